"""The page of a run: its files, and the server and the single file that they are shown from.

- The page requests nothing from anywhere but its own origin.
- Text from outside is shown as text: nothing is parsed as HTML.
"""
