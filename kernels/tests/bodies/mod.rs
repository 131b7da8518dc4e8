//! The kernels' test bodies, one module a kernel, generic over the backend.
//!
//! A body checks a backend against the definitions in `tidemill_kernels::reference` and against the
//! promises of `tidemill_kernels::backend`, and returns a [`Transcript`](agreement::Transcript) of
//! the bits that it saw. The test file of a backend (`cpu.rs`, `emulator.rs`, `cuda.rs`) names the arms, and runs every
//! body of [`every_body`] on each of them.

pub mod adamw;
pub mod agreement;
pub mod arm;
pub mod attention;
pub mod attention_cached;
pub mod attention_case;
pub mod attention_refusals;
pub mod attention_repeats;
pub mod attention_shared_keys;
pub mod axpby;
pub mod biased_products;
pub mod causal_conv1d;
pub mod causal_conv1d_piece;
pub mod cross_entropy;
pub mod device;
pub mod documents;
pub mod draw;
pub mod embedding;
pub mod gated_silu;
pub mod gradient_sums;
pub mod graphs;
pub mod head_scan;
pub mod head_scan_case;
pub mod head_scan_piece;
pub mod head_scan_refusals;
pub mod inputs;
pub mod layer_norm;
pub mod likeliest;
pub mod lion;
pub mod master;
pub mod matmul;
pub mod memory;
pub mod norm_case;
pub mod number;
pub mod ordered_product;
pub mod pieces;
pub mod refusal_case;
pub mod refusals;
pub mod rms_norm;
pub mod rotary;
pub mod row_maps;
pub mod scan_case;
pub mod selective_scan;
pub mod selective_scan_piece;
pub mod selective_scan_step;
pub mod sequence_refusals;
pub mod tree_sum;
pub mod views;
pub mod weight_gradient;

/// Calls a macro with every body and the name of its test: first the bodies whose results all arms
/// of a kind must have to the bit, then those for which one arm is enough, since they check
/// decisions before a kernel's loops; of both, the bodies whose kernels differ where groups of
/// warps multiply together are listed separately.
macro_rules! every_body {
    ($tests:ident) => {
        $tests! {
            of_all_arms {
                matmul_agrees: bodies::matmul::agrees;
                matmul_with_a_bias_agrees: bodies::biased_products::agree;
                matmul_backward_agrees: bodies::matmul::backward_agrees;
                matmul_elements_are_independent: bodies::matmul::elements_are_independent;
                matmul_rows_of_any_number_agree: bodies::matmul::rows_of_any_number_agree;
                weight_gradient_agrees: bodies::weight_gradient::agrees;
                weight_gradient_parts_are_added_in_order: bodies::weight_gradient::parts_are_added_in_order;
                embedding_agrees: bodies::embedding::agrees;
                rms_norm_agrees: bodies::rms_norm::agrees;
                rms_norm_rows_are_independent: bodies::rms_norm::rows_are_independent;
                rms_norm_many_rows_are_independent:
                    bodies::rms_norm::many_rows_are_independent;
                rms_norm_of_activations_agrees: bodies::rms_norm::of_activations_agrees;
                rms_norm_rows_of_activations_are_independent:
                    bodies::rms_norm::rows_of_activations_are_independent;
                layer_norm_agrees: bodies::layer_norm::agrees;
                layer_norm_of_long_grains_agrees: bodies::layer_norm::long_grains_agree;
                layer_norm_rows_are_independent: bodies::layer_norm::rows_are_independent;
                layer_norm_many_rows_are_independent:
                    bodies::layer_norm::many_rows_are_independent;
                gelu_agrees: bodies::row_maps::gelu_agrees;
                gelu_saturates: bodies::row_maps::gelu_saturates;
                gated_silu_agrees: bodies::gated_silu::agrees;
                gated_silu_saturates: bodies::gated_silu::saturates;
                rotary_agrees: bodies::rotary::agrees;
                biases_agree: bodies::row_maps::biases_agree;
                biases_of_long_grains_agree: bodies::row_maps::biases_of_long_grains_agree;
                clamps_agree: bodies::row_maps::clamps_agree;
                causal_conv1d_agrees: bodies::causal_conv1d::agrees;
                silu_agrees: bodies::causal_conv1d::silu_agrees;
                causal_conv1d_samples_are_independent: bodies::causal_conv1d::samples_are_independent;
                causal_conv1d_documents_agree: bodies::causal_conv1d::documents_agree;
                causal_conv1d_documents_are_independent: bodies::causal_conv1d::documents_are_independent;
                causal_conv1d_steps_agree: bodies::causal_conv1d_piece::steps_agree;
                causal_conv1d_pieces_agree: bodies::causal_conv1d_piece::pieces_agree;
                selective_scan_agrees: bodies::selective_scan::agrees;
                selective_scan_samples_are_independent: bodies::selective_scan::samples_are_independent;
                selective_scan_documents_agree: bodies::selective_scan::documents_agree;
                selective_scan_documents_are_independent: bodies::selective_scan::documents_are_independent;
                selective_scan_steps_agree: bodies::selective_scan_piece::steps_agree;
                selective_scan_pieces_agree: bodies::selective_scan_piece::pieces_agree;
                selective_scan_steps_with_their_products_agree: bodies::selective_scan_step::agrees;
                head_scan_agrees: bodies::head_scan::agrees;
                head_scan_long_samples_agree: bodies::head_scan::long_samples_agree;
                head_scan_samples_are_independent: bodies::head_scan::samples_are_independent;
                head_scan_documents_agree: bodies::head_scan::documents_agree;
                head_scan_documents_are_independent: bodies::head_scan::documents_are_independent;
                head_scan_pieces_agree: bodies::head_scan_piece::pieces_agree;
                softplus_agrees: bodies::selective_scan_piece::softplus_agrees;
                cross_entropy_agrees: bodies::cross_entropy::agrees;
                cross_entropy_rows_are_independent: bodies::cross_entropy::rows_are_independent;
                accumulate_agrees: bodies::gradient_sums::accumulate_agrees;
                mean_gradient_agrees: bodies::gradient_sums::mean_gradient_agrees;
                tree_sum_agrees: bodies::tree_sum::agrees;
                tree_sums_at_once_agree: bodies::tree_sum::several_at_once_agree;
                axpby_agrees: bodies::axpby::agrees;
                sums_of_squares_agree: bodies::gradient_sums::sums_of_squares_agree;
                likeliest_agrees: bodies::likeliest::agrees;
                draw_agrees: bodies::draw::agrees;
                draw_follows_the_distribution: bodies::draw::follows_the_distribution;
                draw_leaves_what_is_in_doubt: bodies::draw::leaves_what_is_in_doubt;
                adamw_agrees: bodies::adamw::agrees;
                adamw_of_masters_agrees: bodies::master::adamw_agrees;
                lion_agrees: bodies::lion::agrees;
                masters_are_split_as_defined: bodies::master::splitting_agrees;
                masters_are_joined_as_defined: bodies::master::joining_agrees;
            }
            of_one_arm {
                buffers_hold_what_is_written: bodies::memory::buffers_hold_what_is_written;
                pinned_memory_holds_what_is_copied: bodies::memory::pinned_memory_holds_what_is_copied;
                wrong_trees_are_refused: bodies::tree_sum::wrong_trees_are_refused;
                one_wrong_tree_stops_all: bodies::tree_sum::one_wrong_tree_of_several_stops_all;
                streams_wait_for_each_other: bodies::memory::streams_wait_for_each_other;
                matmul_of_two_streams_agrees: bodies::matmul::two_streams_agree;
                views_stay_inside: bodies::views::views_stay_inside;
                parts_of_views_name_their_elements: bodies::views::parts_name_their_elements;
                rounded_copies_follow_their_masters: bodies::memory::rounded_copies_follow_their_masters;
                events_complete: bodies::memory::events_complete;
                graphs_repeat_what_was_recorded: bodies::graphs::repeat_what_was_recorded;
                graphs_keep_what_was_dropped: bodies::graphs::keep_what_was_dropped;
                graphs_are_recorded_while_another_thread_drops: bodies::graphs::are_recorded_while_another_thread_drops;
                graphs_refuse_what_cannot_be_recorded: bodies::graphs::refuse_what_cannot_be_recorded;
                graphs_end_with_their_recording: bodies::graphs::end_with_their_recording;
                graphs_answer_the_faults_of_their_kernels: bodies::graphs::answer_the_faults_of_their_kernels;
                adamw_moves_by_the_learning_rate: bodies::adamw::moves_by_the_learning_rate;
                adamw_of_masters_shows_failures_to_products: bodies::master::failures_reach_the_copy;
                lion_shows_failures_to_products: bodies::lion::failures_reach_the_copy;
                lion_refuses_shapes: bodies::lion::refuses_shapes;
                parts_of_masters_name_their_elements: bodies::master::parts_name_their_elements;
                runs_of_masters_are_joined_in_place: bodies::master::runs_are_joined_in_place;
                embedding_refuses_tokens_out_of_range: bodies::embedding::refuses_tokens_out_of_range;
                cross_entropy_refuses_targets_out_of_range: bodies::cross_entropy::refuses_targets_out_of_range;
                matmul_refuses_shapes: bodies::refusals::matmul;
                matmul_refuses_rows_that_overlap: bodies::refusals::overlapping_matmul;
                ordered_product_refuses_shapes: bodies::refusals::ordered_product;
                likeliest_refuses_shapes: bodies::likeliest::refuses_shapes;
                draw_refuses_shapes: bodies::draw::refuses_shapes;
                weight_gradient_refuses_shapes: bodies::refusals::weight_gradient;
                embedding_refuses_shapes: bodies::refusals::embedding;
                rms_norm_refuses_shapes: bodies::rms_norm::refuses_shapes;
                rms_norm_refuses_a_bias: bodies::rms_norm::refuses_a_bias;
                layer_norm_refuses_shapes: bodies::layer_norm::refuses_shapes;
                row_maps_refuse_shapes: bodies::row_maps::refuse_shapes;
                gated_silu_refuses_shapes: bodies::gated_silu::refuses_shapes;
                rotary_refuses_shapes: bodies::rotary::refuses_shapes;
                causal_conv1d_refuses_shapes: bodies::sequence_refusals::causal_conv1d;
                causal_conv1d_pieces_refuse_shapes: bodies::sequence_refusals::causal_conv1d_piece;
                selective_scan_refuses_shapes: bodies::sequence_refusals::selective_scan;
                selective_scan_pieces_refuse_shapes: bodies::sequence_refusals::selective_scan_piece;
                head_scan_refuses_shapes: bodies::head_scan_refusals::head_scan;
                head_scan_pieces_refuse_shapes: bodies::head_scan_refusals::head_scan_piece;
                axpby_refuses_shapes: bodies::axpby::refuses_shapes;
                selective_scan_steps_refuse_shapes: bodies::selective_scan_step::refuses_shapes;
                cross_entropy_refuses_shapes: bodies::refusals::cross_entropy;
                updates_refuse_shapes: bodies::refusals::updates;
                masters_refuse_shapes: bodies::master::refuses_shapes;
            }
            of_groups {
                ordered_product_agrees: bodies::ordered_product::agrees;
                ordered_product_rows_of_any_number_agree: bodies::ordered_product::rows_of_any_number_agree;
                attention_agrees: bodies::attention::agrees;
                attention_of_long_walks_agrees: bodies::attention::long_walks_agree;
                attention_shows_values_that_are_not_finite: bodies::attention::values_that_are_not_finite_are_seen;
                attention_repeats_agree: bodies::attention_repeats::agree;
                attention_rows_are_independent: bodies::attention::rows_are_independent;
                attention_of_one_document_is_that_of_none: bodies::attention::one_document_is_none;
                attention_does_not_change_by_the_unseen: bodies::attention::the_unseen_changes_nothing;
                attention_keeps_unseen_nan_out: bodies::attention::unseen_nan_stays;
                attention_cached_agrees: bodies::attention_cached::agrees;
                attention_steps_agree: bodies::attention_cached::steps_agree;
                attention_of_shared_keys_is_that_of_repeated_ones: bodies::attention_shared_keys::are_repeated_keys;
                attention_cached_of_shared_keys_is_that_of_repeated_ones: bodies::attention_shared_keys::are_repeated_in_caches;
                attention_cached_is_the_same_in_any_cut: bodies::attention_cached::cuts_change_nothing;
            }
            of_one_in_groups {
                attention_refuses_shapes: bodies::attention_refusals::whole;
                attention_cached_refuses_shapes: bodies::attention_refusals::cached;
            }
        }
    };
}
pub(crate) use every_body;
