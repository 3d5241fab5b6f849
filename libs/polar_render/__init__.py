"""Messages ↔ token ids: renderers, the template bridge, its start-up proof, parsing of sampled ids."""

from .profile import CHATML_TOOLS, ModelProfile, load_renderer, profile_for

__all__ = ["CHATML_TOOLS", "ModelProfile", "load_renderer", "profile_for"]
