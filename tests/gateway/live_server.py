"""A real HTTP server in this process, for clients on real sockets."""

import asyncio
import logging

from headrace.gateway.server import HttpServer, bind_socket


def with_server(client, app, keep_alive_seconds=75.0):
    """Run `client(server, address)` in a thread beside a server; then stop the server."""

    async def scenario():
        listener = bind_socket("127.0.0.1", 0, 64)
        address = listener.getsockname()
        server = HttpServer(app, listener, backlog=64, max_connections=64, keep_alive_seconds=keep_alive_seconds)
        serving = asyncio.create_task(server.serve())
        try:
            return await asyncio.to_thread(client, server, address)
        finally:
            server.stop()
            await asyncio.wait_for(serving, 5)

    root = logging.getLogger()
    handlers = root.handlers[:]
    try:
        return asyncio.run(scenario())
    finally:
        root.handlers[:] = handlers
