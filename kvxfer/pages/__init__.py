"""Pages of blocks as safetensors files and objects: names, headers, verification, encryption."""
