"""Public names of torch.distributed that have no row in the table of calls (calls.py), and why."""

from __future__ import annotations

NOT_CALLS = {
    **dict.fromkeys(("Store", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Backend", "BackendConfig", "P2POp",
                     "Work", "ReduceOp", "reduce_op", "GroupMember", "GroupName", "group", "DebugLevel",
                     "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BarrierOptions",
                     "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions"),
                    "a type, or a value"),
    **dict.fromkeys(("get_backend", "get_backend_config", "get_debug_level", "get_default_backend_for_device",
                     "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count",
                     "get_process_group_ranks", "get_rank", "get_world_size", "is_backend_available",
                     "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
                     "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "supports_complex",
                     "default_pg_timeout", "record_comm"), "asks nobody else"),
    **dict.fromkeys(("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
                     "destroy_process_group", "split_group", "shrink_group"), "tests/runtime/test_groups_of_all.py"),
    **dict.fromkeys(("Work.block_current_stream", "Work.boxed", "Work.unbox", "Work.get_future_result"),
                    "not there over Gloo either"),
    **dict.fromkeys(("functional.wait_tensor", "functional.wait_tensor_backward",
                     "functional.wait_tensor_setup_context",
                     "functional.allow_inflight_collective_as_graph_input_ctx"), "of all functional ones"),
    **{f"functional.{name}{kind}": "one that is there, for autograd"
       for name in ("all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
                    "all_to_all_single") for kind in ("_autograd",)},
    **{f"functional.{name}{kind}": "for autograd, of one that is there"
       for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
                    "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
       for kind in ("_backward", "_setup_context")},
    **dict.fromkeys(("functional.all_gather_single", "functional.all_gather_single_coalesced",
                     "functional.reduce_scatter_single", "functional.reduce_scatter_single_coalesced"),
                    "torch's newer name of one that is there"),
    **{f"functional.{name}_inplace": "for compiled code, which the plugin refuses"
       for name in ("all_gather_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all", "all_gather", "isend",
                    "irecv", "batch_p2p_ops")},
    **dict.fromkeys(("checkpoint.save_state_dict", "checkpoint.load_state_dict",
                     "checkpoint.load_sharded_optimizer_state_dict"), "torch's older name, or builds on one"),
}  # fmt: skip
