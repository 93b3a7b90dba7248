"""Copies between HiCache's host pools and the device, which this stand-in does not have."""

from sgl_kernel.missing import missing

_NAMES = (
    "transfer_embedding_ranges_direct",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_dim_exchange",
    "transfer_kv_direct",
    "transfer_kv_mamba_lf_pf",
    "transfer_kv_mamba_pf_lf",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
)
globals().update({name: missing(f"kvcacheio.{name}", "HiCache") for name in _NAMES})
