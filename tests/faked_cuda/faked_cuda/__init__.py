"""CUDA faked on a CPU build of torch, to run SGLang's CUDA paths and the extension's.

``PYTHONPATH=tests/faked_cuda:scripts/gpu SGLEXT_FAKED_CUDA=1`` fakes it in a process and its
children, before anything sees torch. Then

- ``torch.cuda`` has one device, with streams and events of the CUDA runtime library that
  ``SGLEXT_FAKED_CUDART`` names (:mod:`.streams`, :mod:`.cudart`, :mod:`.device`);
- tensors of the device "cuda" are tensors in host memory whose storage is marked
  (:mod:`.storage`); :mod:`.mode` sees every call of torch, maps devices, marks results, refuses
  what a device would refuse, and reports to :mod:`.journal` what would synchronize;
- operations execute on the host at once, and a stream that waits for an event blocks the host: one
  legal schedule of many, so that races need the checker of the runtime library;
- Triton kernels run in Triton's interpreter, and kernels that need nvcc have torch versions
  (:mod:`.kernels`).
"""
