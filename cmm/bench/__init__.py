"""`python -m cmm.bench`: suites of problems, measured in several processes."""
