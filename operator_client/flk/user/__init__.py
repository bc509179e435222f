"""The user's side: commands that are suggested, lines on a terminal, files in the folders of the user."""
