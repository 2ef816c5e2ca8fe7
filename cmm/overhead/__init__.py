"""Why does a call take longer on the host's clock than its kernel on the GPU?

`python -m cmm.overhead` measures it. What follows is why the barrier before a collective kernel has to stay.

JAX lowers a kernel's semaphores (`pl.get_global`) to a scratch operand that is filled with zeros before each call
(`_emit_mosaic_gpu_custom_call` in jax/_src/pallas/mosaic_gpu/pallas_call_registration.py). So each GPU's stream holds,
in this order: the fill, XLA's barrier kernel (`MosaicGpuExecute` in jaxlib/mosaic/gpu/custom_call.cc), the kernel.
`plgpu.CompilerParams(skip_device_barrier=True)` leaves out the barrier. Two things then go wrong:

1. *A signal is lost.* Streams of two GPUs are ordered by nothing else. A kernel may signal a peer whose fill has not
   run yet. The fill wipes the signal out, and the peer waits for ever.
2. *Memory of somebody else is overwritten.* Buffers are safe by the order of their own GPU's stream alone. The memory
   of the peer's slot may be in use by an operation before the kernel on the peer's stream. Within one program, too:
   compiled for eight calls, the fast kernel's slots share their memory with each other and with the last result, and
   the last call's slot covers semaphores of calls before it.

A kernel could do without if its semaphores outlived the call, each device set them back before it leaves, and devices
shook hands before they send: one signal to whoever sends, "my slot is free". Pallas has no such semaphores. They cannot
be operands: `check_sem_avals` in jax/_src/pallas/primitives.py refuses integers. They cannot be results: they are no
data type of an array. Integers as operands, with results aliased to them and atomics in inline PTX, would be a way past
Pallas; callers would have to hand them from call to call, and at most the barrier's time is to be had.
"""
