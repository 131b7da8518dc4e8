//! The program: one subcommand a file.
//!
//! Results go to standard output (JSON alone with `--format json`), progress and logs to standard error, progress bars
//! only to a terminal. Exit codes: 0 done, 1 fix the input, 2 a wrong flag, 75 a peer or the environment
//! failed and the same command goes on from the last checkpoint.

mod bench;
mod chart;
mod device;
mod doctor;
mod evaluate;
mod exit;
mod generate;
mod import;
mod inspect;
mod metrics_endpoint;
mod order;
mod output;
mod prepare;
mod processes;
mod progress;
mod prune;
mod questions;
mod quiet;
mod report;
mod requests;
mod score;
mod shard;
mod signals;
mod supervise;
mod tokenizer;
mod train;
mod train_tokenizer;

use clap::{Parser, Subcommand, ValueEnum};

use self::exit::ExitCode;

/// Trains sequence models as a timely-dataflow graph: the weights are the same to the bit for any number of
/// workers, any microbatch size and any kills and resumes.
#[derive(Debug, Parser)]
#[command(name = "tidemill", version, propagate_version = true, max_term_width = 100)]
pub struct Program {
    /// The subcommand.
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tokenize documents into a data set of Parquet shards.
    Prepare(prepare::PrepareArguments),
    /// Remove older versions of a data set that is kept up to date.
    Prune(prune::PruneArguments),
    /// Train a tokenizer of byte pairs on documents, as a tokenizer.json.
    Tokenizer(train_tokenizer::TokenizerArguments),
    /// Train a model, or go on with a run that has a checkpoint.
    Train(train::TrainArguments),
    /// Write a RUN.toml from a training file of LLM Foundry or a config of DeepSpeed.
    Import(import::ImportArguments),
    /// Continue prompts.
    Generate(generate::GenerateArguments),
    /// Log-probabilities of token sequences.
    Score(score::ScoreArguments),
    /// Ask questions with known answers: accuracies and perplexities with their standard errors.
    Evaluate(evaluate::EvaluateArguments),
    /// Describe a data set, a run or a checkpoint.
    Inspect(inspect::InspectArguments),
    /// Write an HTML page about runs: losses, speed, kills and resumes, configs.
    Report(report::ReportArguments),
    /// Measure throughput, and name the bound.
    Bench(bench::BenchArguments),
    /// Check the devices of this machine: those found, those that work, the parts that are missing and how to get them.
    Doctor(doctor::DoctorArguments),
}

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// JSON alone on standard output.
    Json,
}

/// Runs the program with this process's arguments, and ends the process.
pub fn main() -> ! {
    run().leave()
}

fn run() -> ExitCode {
    let program = match Program::try_parse() {
        Ok(program) => program,
        Err(error) => return exit::wrong_flags(&error),
    };
    // Failures that a check meets are on its page.
    let logged = if matches!(program.command, Command::Doctor(_)) { "error" } else { "warn" };
    exit::start_logging(logged);
    quiet::silence_caught_panics();
    let result = match program.command {
        Command::Prepare(arguments) => prepare::run(&arguments),
        Command::Prune(arguments) => prune::run(&arguments),
        Command::Tokenizer(arguments) => train_tokenizer::run(&arguments),
        Command::Train(arguments) => train::run(&arguments),
        Command::Import(arguments) => import::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Score(arguments) => score::run(&arguments),
        Command::Evaluate(arguments) => evaluate::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    exit::report(result)
}
