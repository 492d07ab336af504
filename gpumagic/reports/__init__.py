"""What the probes hand to the outside: frozen records, and nothing else.

A report is plain data. It holds no tensor, no frame and no exception, so it can be kept, pickled and sent
to another process. It imports neither torch nor IPython; pandas and the renderers only when asked.

Units everywhere: bytes are ints, times float seconds, percent floats from 0 to 100, devices strings such as
``"cuda:1"``. A figure that could not be had is ``None``, and the reason is in the row's ``reasons`` under the
field's name, or in the report's ``notes``.
"""
