"""Time to first token in vLLM, with the stock attention backend and with the plug-in."""
