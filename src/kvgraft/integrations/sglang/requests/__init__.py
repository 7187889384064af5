"""The life of a request, by what SGLang does with it: each file has the calls of one part of it.

What a request owns and for how long:

    reading     nothing; it keeps its place in the queue until K/V of stored donors are in host memory, or for a while
    promised    nothing; matching runs again in every scheduling round (`promises`)
    loading     donors are pinned in the tree, for the time of the copy only (`loading`)
    loaded      private slots, which leave with the request's row
    finished    what it was answered from goes to the tree under a name of ours, for turns that go on from it (`publishing`)
    retracted   nothing, but its report: the answer goes on from what was copied before (`ends`)

`request.SGLangRequest` alone changes what is known of a request; `guard` keeps failures from SGLang's scheduler,
and `books` is what all parts know together.
"""
