"""ComfyUI nodes: what a graph sees. They follow with a later release; the engine runs from the command line today."""
