"""SGLang as an engine. The only room that imports sglang."""
