"""Polar's local inference engine: a process of its own that speaks vLLM's token endpoint.

The proxy's engine adapter drives a real vLLM and this engine alike. Importing the package needs no torch; `forward`,
`kv` and the model builders do, and are imported only where a model is really made or run.
"""

__all__: list[str] = []
