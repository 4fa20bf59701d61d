"""Shared-memory rings, doorbells and the worker's status page: how gateway and worker processes talk."""
