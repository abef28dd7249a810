"""Graft: LoRA training for Krea 2 and Ideogram 4. ComfyUI's entrance; imports nothing of ComfyUI at import time."""
