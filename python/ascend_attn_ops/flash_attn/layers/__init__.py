"""The layers of flash-attn that are not attention."""
