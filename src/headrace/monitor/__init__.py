"""`headrace top`: one running server, looked at from outside over its public HTTP interface."""
