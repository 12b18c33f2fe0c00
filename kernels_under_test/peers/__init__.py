"""Other libraries' kernels as adapters, for comparison in `sacts bench`. Each is loaded only where it is asked for, and
says in words why it does not load; what it cannot serve of a spec it refuses.
"""

PEERS = {
    "flashinfer": "sacts.kernels_under_test.peers.flashinfer:Adapter",
    "flashinfer-tensor-cores": "sacts.kernels_under_test.peers.flashinfer:TensorCores",
    "flash-sparse-attn": "sacts.kernels_under_test.peers.flash_sparse:Adapter",
    "fla-nsa": "sacts.kernels_under_test.peers.fla_nsa:Adapter",
    "flex": "sacts.kernels_under_test.peers.flex:Adapter",
    "gather-sdpa": "sacts.kernels_under_test.peers.gathered:Adapter",
    "dense-sdpa": "sacts.kernels_under_test.peers.dense:Adapter",
}
