"""The front: joins ingress, reader and sinks into `submit a request, read its stream`.

The only room that imports ingress and sink together. HTTP lives here and nowhere else.
"""
