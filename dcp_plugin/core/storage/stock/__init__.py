"""Storage behind the interfaces of stock DCP: its writer, reader and planners, for programs that call stock's ``save``
and ``load``."""
