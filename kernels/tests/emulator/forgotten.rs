//! Kernels that have lost or changed a line: each test body must fail on them, or it proves nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Removes the first `from` of `source`, runs `body`, and asserts that it fails.
#[track_caller]
fn assert_needs<P: Precision>(
    source: &'static str,
    from: &'static str,
    body: fn(&Arm<Gpu<Emulator, P>>) -> Transcript,
) {
    assert_change_shows(SourceChange { source, from, to: "" }, body);
}

/// Whether `body` fails on the kernels of `emulator`. It fails with a message that contains `expected`, or for a reason of its own, which
/// is an error of the test.
pub fn fails<P: Precision>(
    emulator: Emulator,
    expected: &str,
    body: impl Fn(&Arm<Gpu<Emulator, P>>) -> Transcript,
) -> bool {
    let arm = Arm::new("changed kernels".to_owned(), Gpu::new(emulator));
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(&arm))) else { return false };
    let message = panic.downcast_ref::<String>().map_or("", String::as_str);
    assert!(message.contains(expected), "failed for another reason: {message}");
    true
}

/// Runs `body` on changed kernels, and asserts that it fails. In warps of 32, for which every code path exists: a check that detects a
/// break there detects it for other warps.
#[track_caller]
fn assert_change_shows<P: Precision>(
    change: SourceChange,
    body: fn(&Arm<Gpu<Emulator, P>>) -> Transcript,
) {
    let SourceChange { source, from, to } = change;
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: SEEDS[1] }).unwrap();
    let seen = fails(emulator.with_change(change), "found", body);
    assert!(seen, "{source}: no check saw \"{to}\" for {from}");
}

/// A kernel that may begin before the kernel ahead of it has ended waits for that one in every
/// thread; if one thread does not, the launch fails.
#[test]
fn a_kernel_that_does_not_wait_for_the_one_before_fails_the_body() {
    type Body = fn(&Arm<Gpu<Emulator, Bf16>>) -> Transcript;
    let waits = "await_previous();";
    let bodies: [(_, Body); 10] = [
        ("attention_step.cu", bodies::attention_cached::steps_agree),
        ("causal_conv1d.cu", bodies::causal_conv1d_piece::pieces_agree),
        ("embedding.cu", bodies::embedding::agrees),
        ("head_scan_piece.cu", bodies::head_scan_piece::pieces_agree),
        ("layer_norm.cu", bodies::layer_norm::agrees),
        ("norm_ahead.h", bodies::layer_norm::many_rows_are_independent),
        ("ordered_product.cu", bodies::ordered_product::agrees),
        ("rms_norm.cu", bodies::rms_norm::agrees),
        ("rms_norm_heads.cu", bodies::rms_norm::of_activations_agrees),
        ("scan_step.cu", bodies::selective_scan_step::agrees),
    ];
    for (source, body) in bodies {
        let change = SourceChange { source, from: waits, to: "" };
        let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: SEEDS[1] }).unwrap();
        let seen = fails(emulator.with_change(change), "has not waited", body);
        assert!(seen, "{source}: no launch failed without {waits}");
    }
}

/// Launchers and kernels compute the shared memory of a block separately, for either width of a
/// warp; if they differ, the launch is refused.
#[test]
fn a_launch_gives_the_shared_memory_that_its_kernel_counts() {
    for (source, from) in [
        ("scan_forward.cu", "SHARED_BYTES(scan_forward, sizeof(ForwardShared));"),
        ("attention_forward.cu", "2 * KEYS<P> * P * sizeof(activation) + OWN_SHARED_BYTES<P, 1>;"),
    ] {
        let to = match source {
            "scan_forward.cu" => "SHARED_BYTES(scan_forward, sizeof(ForwardShared) + 16);",
            _ => "2 * KEYS<P> * P * sizeof(activation) + 16;",
        };
        for warp in [32, 64] {
            let emulator = Emulator::new(EmulatorSettings { warp, seed: SEEDS[1] }).unwrap();
            let change = SourceChange { source, from, to };
            let arm = Arm::new(source, Gpu::<_, Fp32>::new(emulator.with_change(change)));
            let body = || match source {
                "scan_forward.cu" => bodies::selective_scan::samples_are_independent(&arm),
                _ => bodies::attention::agrees(&arm),
            };
            let Err(panic) = catch_unwind(AssertUnwindSafe(body)) else {
                panic!("{source}, warps of {warp}: another number of shared bytes was taken");
            };
            let message = panic.downcast_ref::<String>().map_or("", String::as_str);
            assert!(message.contains("dynamic shared bytes of a block"), "{message}");
        }
    }
}

#[test]
fn a_missing_barrier_fails_the_body() {
    let barrier = "__syncthreads();";
    let scan = bodies::selective_scan::samples_are_independent;
    assert_needs::<Fp32>("causal_conv1d_backward.cu", barrier, bodies::causal_conv1d::agrees);
    assert_needs::<Fp32>("attention_forward.cu", barrier, bodies::attention_cached::agrees);
    assert_needs::<Fp32>("attention_step.cu", barrier, bodies::attention_cached::steps_agree);
    assert_needs::<Fp32>("attention_backward.cu", barrier, bodies::attention::agrees);
    assert_needs::<Fp32>("scan_forward.cu", barrier, scan);
    assert_needs::<Fp32>("scan_backward.cu", barrier, scan);
    let heads = bodies::head_scan::samples_are_independent;
    let of_chunk = "    __syncthreads();  // the chunk is loaded\n";
    let of_decays = "    __syncthreads();  // decays are written\n";
    let of_weights = "    __syncthreads();  // weights are written\n";
    let of_rows = "    __syncthreads();  // rows are loaded\n";
    for forgotten in [of_chunk, of_rows] {
        assert_needs::<Fp32>("head_scan_forward.cu", forgotten, heads);
    }
    // With one or two chunks, an order of warps may exist that needs none of these barriers.
    let many_chunks = bodies::head_scan::long_samples_agree;
    for forgotten in [of_decays, of_weights] {
        assert_needs::<Fp32>("head_scan_forward.cu", forgotten, many_chunks);
    }
    for forgotten in [
        "    __syncthreads();  // all threads have finished the previous chunk\n",
        "    __syncthreads();  // all threads have finished the next chunk\n",
        "    __syncthreads();  // sums are written\n",
        of_decays,
        of_weights,
    ] {
        assert_needs::<Fp32>("head_scan_backward.cu", forgotten, many_chunks);
    }
    assert_needs::<Fp32>("head_scan_piece.cu", barrier, bodies::head_scan_piece::pieces_agree);
    assert_needs::<Fp32>("scan_piece.cu", barrier, bodies::selective_scan_piece::pieces_agree);
    assert_needs::<Bf16>("ordered_product.cu", barrier, bodies::ordered_product::agrees);
    assert_needs::<Fp32>("likeliest.cu", barrier, bodies::likeliest::agrees);
    assert_needs::<Fp32>("draw.cu", barrier, bodies::draw::agrees);
    let long = bodies::row_maps::biases_of_long_grains_agree;
    assert_needs::<Fp32>("partial_sums.cu", barrier, long);
}

/// Runs and rows that are loaded ahead are added, and normed, once each, in order.
#[test]
fn what_is_not_loaded_ahead_fails_the_body() {
    let long = bodies::row_maps::biases_of_long_grains_agree;
    assert_needs::<Fp32>("partial_sums.cu", "        bring(begin + STAGE);\n", long);
    let backwards = SourceChange {
        source: "partial_sums.cu",
        from: "sum += stage[i + j][column];",
        to: "sum += stage[i + BATCH - 1 - j][column];",
    };
    assert_change_shows::<Fp32>(backwards, long);
    let of_second = SourceChange {
        source: "partial_sums.cu",
        from: "exists && of_second ? arguments.partials[1]",
        to: "exists && of_second ? arguments.partials[0]",
    };
    assert_change_shows::<Fp32>(of_second, bodies::layer_norm::long_grains_agree);
    let next = "        if (row + TOGETHER < last_row) load_next(row + TOGETHER);\n";
    assert_needs::<Bf16>("norm_ahead.h", next, bodies::rms_norm::many_rows_are_independent);
    assert_needs::<Bf16>("norm_ahead.h", next, bodies::layer_norm::many_rows_are_independent);
    let next = "        if (row + 1 < rows.last_row) load_next(row + 1);\n";
    assert_needs::<Bf16>("norm_ahead.h", next, bodies::rms_norm::rows_are_independent);
}

/// Norms of two packs a thread are those of aligned rows of more than 1,024 columns.
#[test]
fn a_norm_of_two_packs_that_does_nothing_fails_the_body() {
    use bodies::layer_norm::{many_rows_are_independent, rows_are_independent};
    let backward = "norm_backward_ahead<Norm::LAYER, 2>(arguments);";
    assert_needs::<Bf16>("layer_norm.cu", backward, rows_are_independent);
    let change = SourceChange {
        source: "layer_norm.cu",
        from: "norm_forward_ahead<Norm::LAYER, 2>(arguments);",
        to: "await_previous();",
    };
    assert_change_shows::<Bf16>(change, many_rows_are_independent);
}

#[test]
fn a_forgotten_addition_fails_the_body() {
    assert_needs::<Fp32>("tree_sum.cu", "fold(terms[i]);", bodies::tree_sum::agrees);
    let join = "sums[0].at[j] = sums[1].at[j] + sums[0].at[j];";
    assert_needs::<Fp32>("tree_sum.cu", join, bodies::tree_sum::agrees);
    let onward = "tile -= tiles;";
    assert_needs::<Fp32>("tree_sum.cu", onward, bodies::tree_sum::several_at_once_agree);
    let of_lanes = "halve<GROUP * 4>(all, walker.group & 1, group_mask(1));";
    assert_needs::<Fp32>("scan_backward.h", of_lanes, bodies::selective_scan::agrees);
}

/// A scaled sum reads and scales the old values.
#[test]
fn a_forgotten_factor_of_a_sum_fails_the_body() {
    let kept = "fmaf(out[i].at[j], arguments.keep, scaled)";
    let change = SourceChange { source: "optimizer.cu", from: kept, to: "out[i].at[j] + scaled" };
    assert_change_shows::<Bf16>(change, bodies::axpby::agrees);
    assert_needs::<Fp32>("optimizer.cu", " * arguments.factor", bodies::axpby::agrees);
}

/// Parts of a grain are added to each other before they are added to the lane, each once.
#[test]
fn parts_that_are_added_otherwise_fail_the_body() {
    use bodies::weight_gradient;
    let anew = "            of_grain = filled<N>(0.0f);";
    assert_needs::<Fp32>("gradient_sums.cu", anew, weight_gradient::agrees);
    let change = SourceChange { source: "gradient_sums.cu", from: "--left == 0", to: "left != 0" };
    assert_change_shows::<Bf16>(change, weight_gradient::parts_are_added_in_order);
}

/// Columns of other threads, of later loads, and behind the last whole load; the first of equal ones; and numbers that are not finite.
#[test]
fn a_forgotten_column_fails_the_body() {
    for forgotten in [" + half", " + i * STEP", "column += threadIdx.x"] {
        assert_needs::<Fp32>("likeliest.cu", forgotten, bodies::likeliest::agrees);
    }
    for (from, to) in [("next > logit", "next >= logit"), ("of_zeros != 0.0f", "of_zeros > 0.0f")] {
        let change = SourceChange { source: "likeliest.cu", from, to };
        assert_change_shows::<Bf16>(change, bodies::likeliest::agrees);
    }
}

/// Sums of other threads, the order of equal logits, zeros of either sign, totals of higher logits, and min_p.
#[test]
fn a_draw_that_forgets_fails_the_body() {
    for forgotten in [
        "        before += shared.sums[THREADS - 1];",
        " | ~column",
        "limit == POSITIVE_ZERO ? NEGATIVE_ZERO : ",
        "            narrower.above += shared.totals[last + 1];",
        "weight < min_p ? 0.0 : ",
    ] {
        assert_needs::<Fp32>("draw.cu", forgotten, bodies::draw::agrees);
    }
}

/// Segments are added in one order by every kernel that adds them, and each segment starts from zero.
#[test]
fn segments_that_are_added_otherwise_fail_the_body() {
    let rows_agree = bodies::ordered_product::rows_of_any_number_agree;
    let of_few = "total += at[segment * RESULTS];";
    let of_blocks = "total.at[j] += sum[i].at[j]";
    let anew = "                sums[down][across] = zero_sums();";
    assert_needs::<Bf16>("ordered_product.cu", of_few, rows_agree);
    assert_needs::<Bf16>("ordered_product.cu", of_blocks, rows_agree);
    assert_needs::<Bf16>("ordered_product.cu", anew, rows_agree);
}

/// The remainder tells whether a master was rounded up, and a NaN is not rounded like a number.
#[test]
fn a_master_that_is_split_or_joined_otherwise_fails_the_body() {
    let carried = " - ((remainder & 0x8000u) << 1)";
    for forgotten in [carried, " + 0x8000u", "is_nan ? (bits >> 16) | 0x40u : "] {
        assert_needs::<Bf16>("optimizer.cu", forgotten, bodies::master::splitting_agrees);
    }
    assert_needs::<Bf16>("optimizer.cu", carried, bodies::master::adamw_agrees);
}

/// An update of Lion has the same size in both directions.
#[test]
fn a_lion_that_goes_by_more_than_the_sign_fails_the_body() {
    for forgotten in ["direction > 0.0f ? 1.0f : ", "direction < 0.0f ? -1.0f : "] {
        assert_needs::<Bf16>("optimizer.cu", forgotten, bodies::lion::agrees);
    }
}

/// A run of a convolution ends with the gradients handed over by the next run.
#[test]
fn a_forgotten_gradient_of_the_next_run_fails_the_body() {
    let handed = "handed.take(run, walk.gradients + BEFORE);";
    assert_needs::<Fp32>("causal_conv1d_backward.cu", handed, bodies::causal_conv1d::agrees);
}

/// A thread of the backward scan copies values for other threads, which wait for the copy.
#[test]
fn a_forgotten_copy_fails_the_body() {
    let scan = bodies::selective_scan::samples_are_independent;
    let copy =
        "fetch_columns<COPIED, ALIGNED>(raw + Z * ARRAY, place(arguments.z, from, from_channel));";
    let barrier = "__syncthreads();  // skip and bias are loaded, and all copies complete";
    for forgotten in [copy, barrier] {
        assert_needs::<Bf16>("scan_backward.cu", forgotten, scan);
    }
}

/// A segment of a scan continues from the values that the segment before left.
#[test]
fn a_forgotten_segment_fails_the_body() {
    let scan = bodies::selective_scan::samples_are_independent;
    assert_needs::<Fp32>("scan_forward.cu", "unpack(h, load4(checkpoint));", scan);
    let carried = "load_carried(carried, sums, carried_place(arguments, item.chain));";
    assert_needs::<Fp32>("scan_backward.cu", carried, scan);
}

/// A step adds the sums of its groups of lanes and of its chunks, and writes its key and its value.
#[test]
fn a_forgotten_part_of_a_step_fails_the_body() {
    let steps = bodies::attention_cached::steps_agree;
    let of_group = " total += sums[other][i];";
    let of_chunk = "total = fmaf(factor, part[i], total);";
    let entered = "arguments.keys[entry + i] = new_key[i];";
    for forgotten in [of_group, of_chunk, entered, " * LOG2_E"] {
        assert_needs::<Fp32>("attention_step.cu", forgotten, steps);
    }
}

/// A piece continues from the stored state and stores its own, and a step adds like a piece.
#[test]
fn a_forgotten_state_fails_the_body() {
    let pieces = bodies::selective_scan_piece::pieces_agree;
    assert_needs::<Fp32>("scan_piece.cu", "    put4(state, h, wide);\n", pieces);
    assert_needs::<Fp32>("scan_piece.cu", "    take4(h, state, wide);\n", pieces);
    let steps = bodies::selective_scan_piece::steps_agree;
    for forgotten in
        ["store4_streaming(to, make_float4(h[0], h[1], h[2], h[3]));", "put4(to, h, false);"]
    {
        assert_needs::<Fp32>("scan_step.cu", forgotten, steps);
    }
    let change = SourceChange {
        source: "scan_step.cu",
        from: "if (my.row + i >= arguments.samples) break;",
        to: "if (i > 0) break;",
    };
    assert_change_shows::<Fp32>(change, steps);
    assert_needs::<Fp32>("scan_step.cu", "    y += shuffle_xor(y, 2);", pieces);
}

/// A step of the convolution moves the inputs before it to older places.
#[test]
fn an_input_that_stays_in_place_fails_the_body() {
    for (from, to) in [
        ("packed(window[i][tap + 1])", "packed(window[i][tap])"),
        ("first + i < samples ? first + i : 0;", "first < samples ? first : 0;"),
    ] {
        let change = SourceChange { source: "causal_conv1d.cu", from, to };
        assert_change_shows::<Fp32>(change, bodies::causal_conv1d_piece::steps_agree);
    }
}

/// A head's chunks continue from each other, its parts are all added, and the state of a document reaches no other document.
#[test]
fn a_forgotten_part_of_a_scan_of_heads_fails_the_body() {
    use bodies::head_scan::{agrees, documents_are_independent, long_samples_agree};
    type Body = fn(&Arm<Gpu<Emulator, Fp32>>) -> Transcript;
    const FORWARD: &str = "head_scan_forward.cu";
    const BACKWARD: &str = "head_scan_backward.cu";
    const CHUNK: &str = "head_scan_chunk.h";
    let mix = "add_mixed<Triangle::LOWER>(y, mixes, x, out_channel(), own, tiles);";
    let chunks = "while (first < most && !begins(first)) first++;";
    let rows = "return sum + prefix_sums<TILE>(of_row).before;";
    let breaks: [(_, _, _, Body); 14] = [
        (FORWARD, mix, "(void)mixes;", agrees),
        ("head_scan.h", chunks, "first = most;", documents_are_independent),
        (BACKWARD, rows, "return sum;", long_samples_agree),
        (FORWARD, "scale_rows(y, own, steps.from_start);", "", agrees),
        (FORWARD, "if (documents.begins(first)) ", "", agrees),
        (CHUNK, "if (pair.later == pair.earlier) {", "if (true) {", agrees),
        (BACKWARD, "suffix[k] + rest", "suffix[k] + 0.0f * rest", agrees),
        (BACKWARD, "within + to_behind", "0.0f * within + to_behind", long_samples_agree),
        (BACKWARD, "within + to_behind", "within + 0.0f * to_behind", long_samples_agree),
        (BACKWARD, "(from_before + through)", "through", long_samples_agree),
        (BACKWARD, "through + to_all", "0.0f * to_all", long_samples_agree),
        (BACKWARD, "9.313225746154785e-10f", "-1.0f", agrees),
        (BACKWARD, "carried.state_gradient = 0.0f;", "", documents_are_independent),
        (BACKWARD, "if (part > 0) ddelta += arguments.totals[row];", "", agrees),
    ];
    for (source, from, to, body) in breaks {
        assert_change_shows(SourceChange { source, from, to }, body);
    }
    // Only chunks of bf16 have tiles between tiles, and low parts.
    let rests = (
        "split_product.h",
        "first - first_of(high), second - second_of(high)",
        "0.0f * first_of(high), 0.0f",
    );
    let between = (CHUNK, "later * (between", "later * (fmaxf(between, 1.0f)");
    let of_between = (BACKWARD, "sum += shared.pairs[index][0];", "sum += 0.0f;");
    for (source, from, to) in [rests, between, of_between] {
        assert_change_shows::<Bf16>(SourceChange { source, from, to }, long_samples_agree);
    }
}

/// Each head of a row is normalized by itself, forward and backward, and with all of its factors.
#[test]
fn a_norm_of_other_elements_than_a_heads_fails_the_body() {
    let of_heads = bodies::rms_norm::of_activations_agrees;
    let backward = "norm_backward<Norm::RMS, TEAM, ACCESS, Gradient::IN_PLACE>)";
    let of_two = "[](NormBackward of_two) { of_two.heads *= 2; \
                  norm_backward<Norm::RMS, TEAM, ACCESS, Gradient::IN_PLACE>(of_two); })";
    let of_first = "row / arguments.heads * arguments.x_stride";
    let (wide, narrow) = ("rms_norm.cu", "rms_norm_heads.cu");
    for (source, from, to) in [
        (wide, backward, of_two),
        (wide, "head_place(arguments, row, arguments.x_stride)", of_first),
        (wide, "* reciprocal_rms * weight.at[i]", "* reciprocal_rms * weight.at[0]"),
        (narrow, "place.in_rows(arguments.x_stride, width)", "place.row * arguments.x_stride"),
        (
            narrow,
            "x_start + place.in_rows(arguments.x_stride, width)",
            "x_start + place.row * arguments.x_stride",
        ),
        (
            narrow,
            "dy + place.in_rows(arguments.dy_stride, width)",
            "dy + place.row * arguments.dy_stride",
        ),
        (
            narrow,
            "dx + place.in_rows(arguments.dx_stride, width)",
            "dx + place.row * arguments.dx_stride",
        ),
        (narrow, "        row++;\n", ""),
        (narrow, "* reciprocal_rms * weight.packs[k]", "* reciprocal_rms * weight.packs[0]"),
        (narrow, "other < WARPS", "other < 1"),
        (narrow, "mask = TEAM; mask < WARP", "mask = TEAM; mask < TEAM"),
    ] {
        assert_change_shows::<Bf16>(SourceChange { source, from, to }, of_heads);
    }
}

/// A gradient of a key's head is that of every head of queries that shares it.
#[test]
fn a_forgotten_head_of_queries_fails_the_body() {
    let change = SourceChange {
        source: "rotary.cu",
        from: "other += IN_FLIGHT",
        to: "other += 2 * IN_FLIGHT",
    };
    assert_change_shows::<Bf16>(change, bodies::rotary::agrees);
}

/// A piece of heads continues from the stored state and stores its own.
#[test]
fn a_forgotten_state_of_heads_fails_the_body() {
    let pieces = bodies::head_scan_piece::pieces_agree;
    let left = "    for (u32 i = 0; i < TEAM_CHANNELS; i++) put_states(places[i], h[i]);\n";
    let change = SourceChange {
        source: "head_scan_piece.cu",
        from: left,
        to: "    for (u32 i = 0; i < 1; i++) {}\n",
    };
    assert_change_shows::<Fp32>(change, pieces);
    assert_needs::<Fp32>("head_scan_piece.cu", " + shuffle_xor(odd ? first : second, 8)", pieces);
}

/// A step that computes its raw step sizes itself adds all terms, of its own channel, and rounds them.
#[test]
fn a_step_with_another_product_fails_the_body() {
    let steps = bodies::selective_scan_step::agrees;
    for (from, to) in [
        ("exchange_halves(its[0]);", ""),
        ("if (column % of_lane == i) found = its;", "found = its;"),
        ("return widen(rounded(found));", "return found;"),
        ("settled(given.low + my.row * given.low_stride)", "settled(given.low)"),
    ] {
        let change = SourceChange { source: "scan_step.cu", from, to };
        assert_change_shows::<Bf16>(change, steps);
    }
}
