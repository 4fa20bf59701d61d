"""Studies: questions about a server, each answered by one or several runs. They decide what to run and say what it means."""
