"""Check any OpenAI-compatible server against what an application will meet; docs/audit.md says how it scores."""
