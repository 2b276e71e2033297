"""Length-aware dispatch: prompts with long expected answers run on reserved workers, in small batches.

- Lengths are predicted from earlier epochs only; a prompt without history goes to the regular lane.
- With a fraction of 0 it is the default, first issued, first served.
- What `take` returns must be leased before the next `take`: running slots are counted by their leases.
"""
