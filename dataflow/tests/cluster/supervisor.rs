//! Supervised processes: they live and die together, and the exit code says why.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidemill::cluster::{
    ClusterError, Failure, Invitation, Killed, Supervisor, SupervisorOutcome, SupervisorSettings,
    execute, join_supervised,
};

use crate::processes::command;
use crate::ring::{SOON, ring, soon};

const INVITATION: &str = "TIDEMILL_TEST_INVITATION";

/// A supervised process of a test: joins, runs the ring, and behaves as its role says.
pub fn supervised_child(role: &str) -> ! {
    if role == "early-exit" {
        std::process::exit(3);
    }
    let invitation = std::env::var(INVITATION).unwrap().parse().unwrap();
    println!("\nsupervisor {}", std::env::var(INVITATION).unwrap().split('/').next().unwrap());
    let (mut settings, lifeline) = match join_supervised(&invitation, 1) {
        Ok(joined) => joined,
        Err(ClusterError::StoppedEarly) => std::process::exit(0),
        Err(error) => std::process::exit(error.exit_class().exit_code().into()),
    };
    lifeline.on_lost(|| std::process::exit(75));
    if role == "die-after-joining" {
        std::process::exit(3);
    }
    settings.peer_deadline = Duration::from_secs(1);
    let stop = lifeline.stop_flag();
    let role = role.to_string();
    let result = execute(settings, move |context| -> Result<(), Failure> {
        ring(context, |_| {});
        for _ in 0..20 {
            context.step_or_park()?;
        }
        println!("\nat work");
        let index = context.index();
        match role.as_str() {
            "wrong-input" if index == 1 => return Err(Failure::fix_input("wrong input")),
            "panic" if index == 1 => panic!("a bug"),
            "stop" if index == 1 => {
                let pid = std::process::id().to_string();
                Command::new("kill").args(["-STOP", &pid]).status()?;
            }
            _ => {}
        }
        context.step_while(|| !stop.load(Ordering::Acquire))?;
        for dataflow in context.installed_dataflows() {
            context.drop_dataflow(dataflow);
        }
        Ok(())
    });
    std::process::exit(result.map_or_else(|error| error.exit_class().exit_code().into(), |_| 0));
}

/// A supervisor in a process of its own, so that it can be killed.
pub fn supervising_child() -> ! {
    let supervisor = Supervisor::new(patience()).unwrap();
    let outcome = supervisor.run(|_, invitation| {
        let mut child = child("run", invitation);
        child.stdout(Stdio::inherit());
        child
    });
    let outcome = outcome.unwrap();
    std::process::exit(outcome.exit_code().into());
}

fn patience() -> SupervisorSettings {
    SupervisorSettings { grace: Duration::from_secs(1), ..SupervisorSettings::new(2) }
}

fn child(role: &str, invitation: &Invitation) -> Command {
    let mut child = command(role);
    child.env(INVITATION, invitation.to_string()).stdout(Stdio::null());
    child
}

fn supervise(role: &str, processes: usize) -> Result<SupervisorOutcome, ClusterError> {
    let settings = SupervisorSettings { processes, ..patience() };
    Supervisor::new(settings)?.run(|_, invitation| child(role, invitation))
}

#[test]
fn wrong_input_in_one_process_is_exit_code_1_for_all() {
    let outcome = soon(|| supervise("wrong-input", 3)).unwrap();
    assert_eq!(outcome.exit_code(), 1);
    assert!(
        outcome
            .children
            .iter()
            .all(|child| child.status.code() == Some(1) && child.killed.is_none())
    );
}

#[test]
fn a_panic_in_one_process_is_exit_code_75_for_all() {
    let outcome = soon(|| supervise("panic", 2)).unwrap();
    assert_eq!(outcome.exit_code(), 75);
    assert!(
        outcome
            .children
            .iter()
            .all(|child| child.status.code() == Some(75) && child.killed.is_none())
    );
}

#[test]
fn processes_that_end_before_they_join_take_the_others_along() {
    let supervisor = Supervisor::new(patience()).unwrap();
    let outcome = soon(|| {
        supervisor.run(|process, invitation| {
            child(if process == 0 { "run" } else { "early-exit" }, invitation)
        })
    })
    .unwrap();
    let codes: Vec<_> = outcome.children.iter().map(|child| child.status.code()).collect();
    assert_eq!((codes, outcome.exit_code()), (vec![Some(75), Some(3)], 75));
}

/// The others wait for it to meet them, and have no connection to it that could break.
#[test]
fn a_process_that_dies_before_all_have_met_ends_the_others_at_once() {
    let settings = SupervisorSettings { grace: SOON * 4, ..SupervisorSettings::new(3) };
    let supervisor = Supervisor::new(settings).unwrap();
    let role = |process| if process == 1 { "die-after-joining" } else { "run" };
    let outcome =
        soon(|| supervisor.run(|process, invitation| child(role(process), invitation))).unwrap();
    let codes: Vec<_> = outcome.children.iter().map(|child| child.status.code()).collect();
    assert_eq!(codes, [Some(75), Some(3), Some(75)]);
    assert!(outcome.children.iter().all(|child| child.killed.is_none()), "{outcome:?}");
}

#[test]
fn idle_strangers_keep_no_child_from_joining() {
    let supervisor = Supervisor::new(patience()).unwrap();
    let mut strangers = Vec::new();
    let outcome = soon(|| {
        supervisor.run(|process, invitation| {
            let address = invitation.to_string();
            let address = address.split('/').next().unwrap();
            if process == 0 {
                strangers.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
            }
            child("wrong-input", invitation)
        })
    });
    // It joined, ran, and failed as it was to.
    assert_eq!(outcome.unwrap().exit_code(), 1);
}

#[test]
fn the_port_of_a_supervisor_is_closed_once_all_have_joined() {
    let mut supervisor = command("supervisor").stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    let mut stdout = BufReader::new(supervisor.stdout.take().unwrap());
    let start = Instant::now();
    while text.matches("at work").count() < 2 {
        assert!(stdout.read_line(&mut text).unwrap() > 0 && start.elapsed() < SOON, "{text}");
    }
    let address = text.lines().find_map(|line| line.strip_prefix("supervisor ")).unwrap();
    let refused = TcpStream::connect(address).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

#[test]
fn a_stopped_process_is_killed_after_the_grace() {
    // Its peers end after their deadline of a second; the grace is another.
    let outcome = soon(|| supervise("stop", 2)).unwrap();
    assert_eq!(outcome.exit_code(), 75);
    let killed: Vec<_> = outcome.children.iter().map(|child| child.killed).collect();
    assert_eq!(killed, [None, Some(Killed::Outlived)]);
}

#[test]
fn a_silent_process_is_killed_even_when_it_has_no_peers() {
    let settings = SupervisorSettings {
        processes: 1,
        silence_deadline: Duration::from_secs(1),
        ..SupervisorSettings::new(1)
    };
    let started = Supervisor::new(settings).unwrap();
    let outcome = soon(|| {
        started.run(|_, invitation| {
            let mut shell = Command::new("sh");
            // The shell replaces itself; its process id is then the child's.
            let line = "(sleep 0.7; kill -STOP $$) & exec \"$0\" \"$@\"";
            let child = child("run", invitation);
            shell.args(["-c", line]).arg(child.get_program()).args(child.get_args());
            shell.stdout(Stdio::null());
            shell.envs(child.get_envs().filter_map(|(key, value)| Some((key, value?))));
            shell
        })
    })
    .unwrap();
    assert_eq!(outcome.children[0].killed, Some(Killed::Silent));
    assert_eq!(outcome.exit_code(), 75);
}

#[test]
fn a_stop_reaches_every_process_also_before_they_have_joined() {
    for delay in [Duration::ZERO, Duration::from_millis(700)] {
        let supervisor = Supervisor::new(patience()).unwrap();
        let stop = supervisor.stop_handle();
        let (cancel, cancelled) = mpsc::channel::<()>();
        let stopper = std::thread::spawn(move || {
            let _ = cancelled.recv_timeout(delay);
            stop.stop();
        });
        let outcome = soon(|| supervisor.run(|_, invitation| child("run", invitation))).unwrap();
        drop(cancel);
        stopper.join().unwrap();
        assert_eq!(outcome.exit_code(), 0, "{outcome:?}");
    }
}

#[test]
fn a_program_that_cannot_be_started_leaves_nobody_behind() {
    let supervisor = Supervisor::new(patience()).unwrap();
    let (sender, started) = mpsc::channel();
    let result = supervisor.run(|process, _| {
        if process == 0 {
            // It would not end by itself; its output ends when it does.
            let (reader, writer) = std::io::pipe().unwrap();
            sender.send(reader).unwrap();
            let mut first = Command::new("sleep");
            first.arg("30").stdout(writer);
            return first;
        }
        Command::new("no/such/program")
    });
    let text = result.unwrap_err().to_string();
    assert_eq!(text, "cannot start process 1 (no/such/program)");
    soon(|| started.recv().unwrap().read_to_end(&mut Vec::new())).unwrap();
}

#[test]
fn children_die_with_a_killed_supervisor() {
    let mut supervisor = command("supervisor").stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = supervisor.stdout.take().unwrap();
    // The children write to the same pipe: it ends when all of them have.
    let mut text = String::new();
    let start = Instant::now();
    while text.matches("at work").count() < 2 {
        let mut bytes = [0; 1024];
        let count = stdout.read(&mut bytes).unwrap();
        assert!(count > 0 && start.elapsed() < SOON, "never ran: {text}");
        text.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    soon(|| stdout.read_to_string(&mut text)).unwrap();
}
