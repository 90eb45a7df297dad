"""whet: sharpen a language model after pretraining. Start with ``whet train quickstart``."""

__version__ = "0.1.0"
