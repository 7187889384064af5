"""For engines that keep their requests' rows in the cache itself, as SGLang's scheduler does; no engine of ours runs this.

`chunk` is a cache that shares nothing, `sessions` one that keeps a conversation's row between its turns. A request's row
and its way through any cache are `kvgraft.prefix.request` and `lifecycle`.
"""
