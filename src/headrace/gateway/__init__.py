"""The gateway process: HTTP in, tokens out."""
