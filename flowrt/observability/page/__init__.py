"""The page of a run: its files, its server, and its form as a single file.

- The page requests nothing but from its own origin.
- Text from outside is shown as text and never parsed as HTML.
"""
