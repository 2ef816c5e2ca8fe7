"""What the roles of a ring kernel do when, recorded on the GPU, and `python -m cmm.trace`.

The kernels make marks (`cmm.hopper.marks`) if they are given a recorder; here these become events on one axis of time.

`python -m cmm.trace --account` says where the time of every method goes beyond that of the product alone
(`cmm.trace.account`).
"""
