"""The mutants of tools/mutation.py: small errors that tests should notice.

By file, pairs of a text that occurs exactly once in it and of what replaces it. Where only a part
of the text is replaced, that part stands between « and », and the rest says where it is. In C++
the replaced part is an expression.
"""

from __future__ import annotations

Table = dict[str, list[tuple[str, str]]]

KERNELS: Table = {
    "csrc/cpu/attention_update.cpp": [
        ("max + std::log(sum)", "max - std::log(sum)"),
        ("lse[i] > max || std::isnan(lse[i])", "lse[i] > max"),
    ],
    "csrc/cpu/common/attention_rows.cpp": [
        ("softmax_weight(max[r], largest)", "T(1)"),
        ("kept.end(«token(count - 1)»)", "token(0)"),
    ],
    "csrc/cpu/common/attention_rows.h": [
        ("sequence.keys > 0 ? kLowest<T> : T(0)", "kLowest<T>"),
        ("static_cast<float>(rounded)", "static_cast<float>(factor * from[i])"),
    ],
    "csrc/cpu/common/attention_scores.h": [
        ("begin - query + attention_.distance_shift", "begin - query"),
        ("(word >> i) & 1 ? «kept» : T(0)", "T(1)"),
        ("std::min<int64_t>(5, drop_bytes_ - byte)", "std::min<int64_t>(4, drop_bytes_ - byte)"),
    ],
    "csrc/cpu/common/attention_tiles.h": [
        ("kept.end(«(first_row + rows - 1)» / group)", "first_row"),
    ],
    "csrc/cpu/common/dense_attention.cpp": [
        ("*key_start - first(options.q_start_idx).value_or(0)", "*key_start"),
        ("mode == SparseMode::band_left_up_causal", "false"),
        ("query % kCompressedPseRows", "query"),
        ("mask.size(1) != longest(&DenseSequence::keys)", "false"),
    ],
    "csrc/cpu/common/dense_attention.h": [
        (
            "return «sequence.rows_before * heads» + head * sequence.queries",
            "sequence.rows_before * key_heads",
        ),
    ],
    "csrc/cpu/common/dense_attention_grad.h": [
        ("score == kExcluded", "false"),
    ],
    "csrc/cpu/common/partial_attention.h": [
        ("«factor» * merged.sum[r] + next_factor", "T(1)"),
        ("part < first_parts[task + 1]", "part < first_parts[task + 1] - 1"),
        ("const bool none = «from.sum[h] == 0»", "false"),
    ],
    "csrc/cpu/common/indexer.h": [
        ("x < 0 ? T(0) : x", "x > 0 ? x : T(0)"),
    ],
    "csrc/cpu/common/indexer_gradient.h": [
        ("row[h] > 0", "row[h] >= 0"),
    ],
    "csrc/cpu/common/sparse_inputs.cpp": [
        ("check_value(«block >= 0 && block < num_blocks_»", "block < num_blocks_"),
        ("lowest >= -1 && highest < blocks", "highest < blocks"),
        ("bsnd && selectable == Selectable::all_keys", "bsnd"),
    ],
    "csrc/cpu/common/parallel_scatter_add.h": [
        ("worker = 1; «worker < workers»", "worker < workers - 1"),
    ],
    "csrc/cpu/common/portable_gemm.cpp": [
        ("part.accumulate = «true»", "p.accumulate"),
    ],
    "csrc/cpu/common/sparse_inputs.h": [
        ("a.strides() == b.strides()", "true"),
    ],
    "csrc/cpu/common/sparse_indices.h": [
        ("keys / block_size + (keys % block_size != 0)", "keys / block_size + 1"),
    ],
    "csrc/cpu/common/top_k.h": [
        ("score == score ? ordered : «kHighest»", "kLowest"),
        ("ties-- > 0", "ties-- > 1"),
    ],
    "csrc/cpu/common/transposition.h": [
        ("int64_t row = «whole_rows»; row < rows", "whole_rows + 1"),
    ],
    "csrc/cpu/common/vectorized.h": [
        ("(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "(bits + 0x8000) >> 16"),
    ],
    "csrc/cpu/common/token_rows.h": [
        ("tensor.size(-1) <= 1 || «tensor.stride(-1) == 1»", "tensor.stride(-1) >= 1"),
        ("zero(«end», tokens);", "tokens"),
    ],
    "csrc/cpu/flash_attention_score_grad.cpp": [
        ("begin < sequence.keys; begin += «parts * kKeyBlock»", "kKeyBlock"),
    ],
    "csrc/cpu/flash_attention_score_pse_grad.cpp": [
        ("forward.pse_type == 1 ? «forward.scale» : 1.0", "1.0"),
    ],
    "csrc/cpu/lightning_indexer.cpp": [
        ("scores[best[i]]", "scores[i]"),
    ],
    "csrc/cpu/lightning_indexer_grad.cpp": [
        ("d_values + begin", "d_values"),
    ],
    "csrc/cpu/prompt_flash_attention.cpp": [
        ("bits & 0xFFFFE000u", "bits"),
        ("std::isnormal(value)", "std::isfinite(value)"),
    ],
    "csrc/cpu/prompt_flash_attention_int8.cpp": [
        ("(deq_scale < 0) != (scale < 0)", "deq_scale < 0"),
        ("«scales_.quant_scale1 < 0» ? 128.0f", "false"),
        ("begin % kExactKeys == 0", "false"),
    ],
    "csrc/cpu/scatter_pa_kv_cache.cpp": [
        ("return «slot >= capacity»;", "slot > capacity"),
        ("head_stride == head_bytes && «piece_stride == head_bytes»", "true"),
        ("std::nearbyint(value)", "value"),
    ],
    "csrc/cpu/sparse_flash_attention_grad.cpp": [
        ("scale(sum + 2 * size, «factor»,", "T(1)"),
    ],
    "csrc/cpu/sparse_lightning_indexer_grad_kl_loss.cpp": [
        ("std::max(log_y, std::log(epsilon))", "log_y"),
        ("!positions_.empty() && «factor != 0»", "true"),
    ],
}

RULES: Table = {
    "csrc/autograd/attention_update.cpp": [
        ("d_lse.sub_(mean).add_(op.d_lse_out)", "d_lse.sub_(mean)"),
    ],
    "csrc/autograd/autocast.cpp": [
        ("op.options.pse_type >= kFirstTypeOfSlopes", "op.options.pse_type > kFirstTypeOfSlopes"),
    ],
    "csrc/autograd/lightning_indexer.cpp": [
        (".sparse_mode = «op.sparse_mode»", "int64_t{3}"),
    ],
    "csrc/autograd/kernels.cpp": [
        ('context->saved_data["limits"].toInt()', "limits_override()"),
    ],
    "csrc/autograd/sparse_lightning_indexer_grad_kl_loss.cpp": [
        ("if («at::GradMode::is_enabled()»)", "false"),
    ],
    "csrc/core/limits.cpp": [
        ("value >= min && «value <= max»", "value < max"),
    ],
    "csrc/core/memory.h": [
        ("first.begin + block * stride < span.end", "first.begin + block * stride <= span.end"),
        ("from >= bytes() && «from + other.bytes() <= stride»", "true"),
    ],
    "csrc/dispatch/outputs.cpp": [
        ("!tensor.is_contiguous()", "false"),
    ],
    "csrc/core/sequence_lengths.cpp": [
        ("check_value(«length >= previous», op", "true"),
        ("«lengths->size() == 1» ? 0 : batch", "true"),
    ],
    "csrc/core/sparse_mode.h": [
        ("std::clamp(tokens, -kUnbounded, kUnbounded)", "tokens"),
    ],
    "csrc/ops/sparse_rules.cpp": [
        ("check_present(«query_rope.tensor || !key_rope.tensor», op_", "true"),
        (
            "dtype == query_.tensor.scalar_type() || «dtype == at::kFloat», op_",
            "at::isFloatingType(dtype)",
        ),
    ],
    "csrc/core/tensor_checks.cpp": [
        ("static_cast<size_t>(last + 1)", "static_cast<size_t>(last)"),
        ("std::isfinite(static_cast<float>(scale_value))", "std::isfinite(scale_value)"),
    ],
    "csrc/ops/attention_update.cpp": [
        ("local_out.size() == lse.size()", "local_out.size() >= lse.size()"),
    ],
    "csrc/ops/flash_attention_score.cpp": [
        ("queries > kCompressedPseRows", "queries >= kCompressedPseRows"),
    ],
    "csrc/ops/flash_attention_score_mask.cpp": [
        ("(next >= -pre && «-pre < keys»)", "-pre <= keys"),
    ],
    "csrc/ops/flash_attention_score_rules.cpp": [
        ("value_head_size_ > 0 && «value_head_size_ <= head_size_»", "true"),
        ("bits / 8 + (bits % 8 + 7) / 8", "bits / 8"),
    ],
    "csrc/ops/lightning_indexer.cpp": [
        ("*count >= 1", "*count >= 0"),
    ],
    "csrc/ops/prompt_flash_attention.cpp": [
        ("at_most(heads, key_heads_ * kMostQueryHeads)", "true"),
    ],
    "csrc/ops/prompt_flash_attention_quantization.cpp": [
        ("-shift - pre > 0", "-shift - pre >= 0"),
    ],
    "csrc/ops/scatter_pa_kv_cache.cpp": [
        ("op_.offsets[0] >= 0 && «op_.offsets[1] >= 0»", "true"),
    ],
    "csrc/ops/scatter_pa_kv_cache_memory.cpp": [
        ("(available - row - offset) / (rows - 1)", "(available - row - offset) / rows"),
    ],
}

PACKAGE: Table = {
    "_arguments.py": [
        ("(x.storage_offset() + last + 1)", "(last + 1)"),
        ("x.numel() == 1 and not x.is_complex()", "x.numel() == 1"),
    ],
    "_dense_attention.py": [
        ("0 <= dropout_p < 1", "0 <= dropout_p <= 1"),
    ],
    "_flash_cache.py": [
        ("0 <= length <= slots - new", "0 <= length <= slots"),
    ],
    "_flash_conventions.py": [
        ("lead = «max»(leads, default=0)", "min"),
    ],
    "_flops.py": [
        ("up_to(«max(tokens - queries, 0)»)", "tokens - queries"),
    ],
    "_flash_passes.py": [
        ("q.shape[-1] ** -0.5 if options.scale is None else options.scale", "q.shape[-1] ** -0.5"),
    ],
    "_packing.py": [
        ("x.diff(dim=-1) != step", "x.diff(dim=-1) < step"),
    ],
    "_pages.py": [
        ("-(-longest // size) if size", "longest // size + 1 if size"),
        ("masked_fill(«(at < 0) | (blocks < 0)», -1)", "blocks < 0"),
        ("(table < 0) | (table >= num_blocks)", "table >= num_blocks"),
        ("read = first < torch", "read = first <= torch"),
    ],
    "_statistics.py": [
        ("«(total == 0) |» (maximum == -_FLT_MAX)", ""),
        ("sum_y * (max_y - maximum).exp()", "sum_y"),
    ],
    "distributed/dtensor/_tokens.py": [
        ("torch.maximum(key - later, before(key))", "key - later"),
        ("(key - (query - part.end).clamp(min=0))«.clamp(min=0)»", ""),
    ],
    "distributed/shards.py": [
        ("any(n < 0 for n in given)", "any(n < -1 for n in given)"),
    ],
    "masks.py": [
        ("sparse_mode in (5, 6)", "sparse_mode in (5,)"),
        (">= size // 2", "> size // 2"),
    ],
    "modules.py": [
        ("(self.num_heads * self.head_dim) ** -0.5", "self.head_dim**-0.5"),
        ("rope_dim % 2 or not 0 <= rope_dim <= head_dim", "not 0 <= rope_dim <= head_dim"),
    ],
    "npu_operators/merging.py": [
        ("not ends or ends[0] != 0 or ends[-1] != tokens", "not ends or ends[0] != 0"),
    ],
    "operators/sparse_lightning_indexer_grad_kl_loss.py": [
        (
            "torch.where(positions < on_device[:, None], weight, 0)",
            "weight * (positions < on_device[:, None])",
        ),
    ],
    "quantization.py": [
        ("_to_int8(value, «deq_scale2 * _LARGEST»)", "s_value"),
    ],
    "training.py": [
        ("op.namespace in _OPERATORS and not op._schema.is_mutable", "op.namespace in _OPERATORS"),
    ],
}
