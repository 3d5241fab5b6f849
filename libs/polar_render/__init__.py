"""Messages ↔ token ids: renderers, the template bridge, its start-up proof, parsing of sampled ids."""
