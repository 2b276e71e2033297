"""Programs that tests of real processes start, and what they share with the tests."""
