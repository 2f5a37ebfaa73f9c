"""Errors of MLX on a Mac, word for word, from the sources of mlx 0.32.2 at commit 846d17622."""

from __future__ import annotations

#: rdma.cpp, jaccl.cpp: errors of `init`, and the fault that each means.
WHILE_FORMING = {
    "[jaccl] Changing queue pair to RTR failed with errno 22": "jaccl-address",
    "[jaccl] No IPv4-mapped GID for this device. Thunderbolt RDMA ports only publish one once the interface "
    "has an IPv4 address; assign a link-local address to it, for example: ifconfig <interface> inet "
    "169.254.0.1 netmask 255.255.0.0 alias": "jaccl-address",
    "[jaccl] Changing queue pair to RTR failed with errno 60": "jaccl-cable",
    "[jaccl] Changing queue pair to RTR failed with errno 16": "jaccl-busy",
    "[jaccl] Creating the queue pair failed with 'Resource busy (16)'.": "jaccl-busy",
    "[jaccl] Creating the queue pair failed with errno 16. Thunderbolt RDMA devices support a limited number "
    "of queue pairs per device and fail here once they are exhausted.": "jaccl-busy",  # mlx #4209
    "[jaccl] Couldn't create completion queue": "jaccl-busy",
    "[jaccl] Couldn't allocate protection domain": "jaccl-used-up",
    "[jaccl] Creating the queue pair failed with 'Invalid argument (22)'.": "jaccl-used-up",
    "[jaccl] Creating the queue pair failed with 'No message available on STREAM (96)'.": "jaccl-used-up",
    "[jaccl] Changing queue pair to INIT failed with errno 96": "jaccl-used-up",
    "[jaccl] Register memory region failed": "jaccl-memory",
    "[jaccl] Could not find device rdma_en9 (3 available)": "jaccl-device",
    "[jaccl] Could not open device rdma_en9": "jaccl-device",
    "[jaccl] The configuration should define a valid mesh or a valid ring.": "jaccl-matrix",
    "[jaccl] The devices do not form a valid mesh.": "jaccl-matrix",
    "[jaccl] The devices do not form a valid ring.": "jaccl-matrix",
    "[jaccl] You need to provide via environment variables a rank (JACCL_RANK/MLX_RANK) and a device file "
    "(JACCL_IBV_DEVICES/MLX_IBV_DEVICES)": "jaccl-environment",
    "[jaccl] You need to provide via environment variables a rank (JACCL_RANK/MLX_RANK), a device file "
    "(JACCL_IBV_DEVICES/MLX_IBV_DEVICES) and a coordinator ip/port (JACCL_COORDINATOR/"
    "MLX_JACCL_COORDINATOR).": "jaccl-environment",
    "[jaccl] The JACCL mesh supports up to 8 peers but 9 were provided.": "jaccl-size",
    "[jaccl] Up to 4 per direction supported but 5 were provided.": "jaccl-size",
    "[jaccl] Device names should be null, a string or array of strings.": "jaccl-names",
}

#: Errors that no address, cable or device explains for certain; rdma.cpp, rdma.h, tcp.cpp, ../jaccl.cpp.
OF_NO_KNOWN_TROUBLE = (
    "[jaccl] Send failed with error code 22",
    "[jaccl] Recv failed with error code 22",
    "[jaccl] Changing queue pair to RTR failed with errno 220",
    "[jaccl] Changing queue pair to INIT failed with errno 5",
    "[jaccl] Buffer can be registered once per protection domain",
    "[jaccl] Send failed with errno=60",
    "[jaccl] Recv failed with errno=2",
    "[jaccl] Couldn't connect (error: 60)",
    "[jaccl] Couldn't bind socket (error: 22)",
    "[jaccl] Group split not supported.",
)

_FAILED = "[METAL] Command buffer execution failed: "  # mlx/backend/metal/device.cpp; the rest is Metal's

OUT_OF_MEMORY = (
    "[malloc] Unable to allocate 68719476736 bytes.",  # mlx/backend/metal/allocator.cpp
    "[metal::malloc] Attempting to allocate 309237645312 bytes which is greater than the maximum allowed "
    "buffer size of 223338299392 bytes.",
    "[metal::malloc] Resource limit (499000) exceeded.",
    f"{_FAILED}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
    f"{_FAILED}Nicht genügend Arbeitsspeicher (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
)
GPU_TIMEOUT = (
    f"{_FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
    f"{_FAILED}Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
    f"{_FAILED}Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
    *(
        f"{_FAILED}Fehler (0000000e:kIOGPUCommandBufferCallbackError{each})."
        for each in ("Timeout", "Hang", "ImpactingInteractivity")
    ),
)
NEITHER = (
    f"{_FAILED}Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
    "[Event::Event] Failed to create Metal shared event.",
    "[ring] connection to a peer was lost",
    "[matmul] Last dimension of first input with shape (1,64) must match second to last dimension",
    "[load_safetensors] Invalid json header length /models/x/model.safetensors",
    "no such luck",
)
