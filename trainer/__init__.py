"""The training engine: no ComfyUI, no user interface."""
