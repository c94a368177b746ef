"""Episodes of several turns: environments, tools, dialogues, and players behind a server."""
