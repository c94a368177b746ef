"""Episodes of several turns: environments, tools, dialogues, and whatever plays behind a server."""
