"""`python -m cmm.tune`: which configuration of a kernel is the fastest for a problem?"""
