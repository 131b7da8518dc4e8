//! The model's test bodies, generic over the backend.
//!
//! The test file of a backend (`cpu.rs`, `emulator.rs`, `cuda.rs`) names the arms, and runs every body of
//! [`every_body`] on each of them.

pub mod arm;
pub mod contract;
pub mod documents;
pub mod families;
pub mod fixtures;
pub mod generation;
pub mod gradients;
pub mod grains;
pub mod lane;
pub mod leases;
pub mod not_finite;
pub mod parameters;
pub mod scores;
pub mod strict_source;
pub mod training;
pub mod transformers;

/// Calls a macro with every body and the name of its test.
macro_rules! every_body {
    ($tests:ident) => {
        $tests! {
            gradients_of_a_tied_model_agree_with_differences: bodies::gradients::tied_agrees;
            gradients_of_an_untied_model_agree_with_differences: bodies::gradients::untied_agrees;
            gradients_of_attention_agree_with_differences: bodies::gradients::attention_agrees;
            gradients_of_attention_are_those_of_the_cpu: bodies::gradients::attention_agrees_with_the_cpu;
            microbatches_of_attention_change_no_bit: bodies::grains::microbatches_of_attention_change_no_bit;
            ignored_targets_of_attention_are_as_if_not_there: bodies::grains::ignored_targets_of_attention;
            recompute_changes_no_bit: bodies::families::recompute_changes_no_bit;
            samples_longer_than_the_positions_are_refused: bodies::families::positions_end;
            microbatches_change_no_bit: bodies::grains::microbatches_change_no_bit;
            grains_of_another_size_are_other_sums: bodies::grains::another_size_is_another_sum;
            documents_of_mamba_are_independent: bodies::documents::of_mamba_are_independent;
            documents_of_attention_are_independent: bodies::documents::of_attention_are_independent;
            ignored_targets_are_as_if_not_there: bodies::grains::ignored_targets_are_as_if_not_there;
            padding_of_the_vocabulary_has_no_gradient: bodies::grains::padding_has_no_gradient;
            an_untrained_model_knows_nothing: bodies::contract::untrained_knows_nothing;
            forward_alone_gives_the_same_losses: bodies::contract::forward_alone_gives_the_same_losses;
            wrong_microbatches_are_named: bodies::contract::wrong_microbatches_are_named;
            blocks_are_finished_backwards: bodies::contract::blocks_are_finished_backwards;
            a_source_of_what_each_block_reads_changes_no_bit: bodies::leases::a_strict_source_changes_no_bit;
            parameters_hold_what_they_were_given: bodies::parameters::hold_what_they_were_given;
            gradient_descent_learns_a_pattern: bodies::contract::gradient_descent_learns;
            scores_are_the_losses_of_the_forward_pass: bodies::scores::scores_are_losses;
            a_score_depends_on_nothing_else: bodies::scores::a_score_depends_on_nothing_else;
            given_tokens_are_read_and_not_counted: bodies::scores::given_tokens_are_read_and_not_counted;
            batches_change_no_bit: bodies::generation::batches_change_no_bit;
            continuations_are_scored_as_whole_texts: bodies::scores::continuations_are_scored_as_whole_texts;
            scores_in_batches_change_no_bit: bodies::scores::scores_in_batches_change_no_bit;
            answers_depend_on_nothing_else: bodies::generation::answers_depend_on_nothing_else;
            how_tokens_are_cut_changes_no_bit: bodies::generation::cuts_change_no_bit;
            drawn_tokens_are_the_hosts: bodies::generation::drawn_tokens_are_the_hosts;
            draws_in_doubt_are_the_hosts: bodies::generation::draws_in_doubt_are_the_hosts;
            writing_stops_and_repeats: bodies::generation::writing_stops_and_repeats;
            answers_end_with_the_positions: bodies::generation::answers_end_with_the_positions;
            logits_that_are_not_finite_are_an_error: bodies::not_finite::logits_are_an_error;
            wrong_text_is_an_error: bodies::generation::wrong_text_is_an_error;
            log_probabilities_are_those_of_transformers: bodies::transformers::log_probabilities;
            greedy_tokens_are_those_of_transformers: bodies::transformers::greedy_tokens;
            six_steps_of_adamw_are_those_of_pytorch: bodies::training::six_steps;
            gradients_are_those_of_the_cpu: bodies::gradients::agree_with_the_cpu;
        }
    };
}
pub(crate) use every_body;
