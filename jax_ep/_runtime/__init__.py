"""The native side of a group in this process: how it starts, what it holds, how it ends."""
