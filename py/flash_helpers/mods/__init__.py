"""Score and mask functions as data: expressions of a score and its place, without torch and without a
compiler.

``mod`` says what an expression is, ``builder`` makes one, and the others read it: ``intervals`` and
``tiles``,
``derivative``, ``stages`` and ``cpp``, ``cost`` and ``text``.
"""
