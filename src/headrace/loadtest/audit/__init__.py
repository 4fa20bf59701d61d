"""Check any OpenAI-compatible server against what an application will meet. docs/audit.md says what is checked and how it scores."""
