"""For engines that keep their requests' rows in the cache itself, as SGLang's scheduler does; no engine of ours runs this.

`request` and `lifecycle` are a request's row and its way through a cache, `chunk` a cache that shares nothing, `sessions`
one that keeps a conversation's row between its turns.
"""
