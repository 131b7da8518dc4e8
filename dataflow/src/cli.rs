//! The program: one subcommand a file.
//!
//! Results go to standard output (JSON alone with `--format json`), progress and logs to standard error, progress bars
//! only to a terminal. Exit codes: 0 done, 1 fix the input, 2 a wrong flag, 75 a peer or the environment
//! failed and the same command goes on from the last checkpoint.

mod bench;
mod chart;
mod device;
mod exit;
mod generate;
mod inspect;
mod order;
mod output;
mod prepare;
mod processes;
mod progress;
mod quiet;
mod requests;
mod score;
mod shard;
mod signals;
mod supervise;
mod tokenizer;
mod train;

use clap::{Parser, Subcommand, ValueEnum};

use self::exit::ExitCode;

/// Trains sequence models as a timely-dataflow graph: the weights are the same to the bit for any number of
/// workers, any microbatch size and any kills and resumes.
#[derive(Debug, Parser)]
#[command(name = "tidemill", version, propagate_version = true, max_term_width = 100)]
pub struct Program {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tokenize documents into a data set of Parquet shards.
    Prepare(prepare::PrepareArguments),
    /// Train a model, or go on with a run that has a checkpoint.
    Train(train::TrainArguments),
    /// Continue prompts.
    Generate(generate::GenerateArguments),
    /// Log-probabilities of token sequences.
    Score(score::ScoreArguments),
    /// Say what a data set, a run or a checkpoint is.
    Inspect(inspect::InspectArguments),
    /// Measure throughput, and what bounds it.
    Bench(bench::BenchArguments),
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
    exit::start_logging();
    quiet::silence_caught_panics();
    let result = match program.command {
        Command::Prepare(arguments) => prepare::run(&arguments),
        Command::Train(arguments) => train::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Score(arguments) => score::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    exit::report(result)
}
