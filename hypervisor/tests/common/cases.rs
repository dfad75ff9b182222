//! Tests that share one machine: a program of their own instead of the usual harness.

/// A name, which is the sentence that it proves, and the test.
pub type Case<M> = (&'static str, fn(&mut M));

/// Functions as [`Case`]s, by their names.
#[macro_export]
macro_rules! cases {
    ($($case:ident),* $(,)?) => { &[$((stringify!($case), $case)),*] };
}

/// What is asked for, in the words of the usual test programs; other options are the program's own.
#[derive(Default)]
pub struct Arguments {
    pub list: bool,
    filter: Option<String>,
    options: Vec<(String, Option<String>)>,
}

impl Arguments {
    /// Reads the command line, where the options `with_value` are followed by one.
    pub fn read(with_value: &[&str]) -> Self {
        let mut arguments = Self::default();
        let mut given = std::env::args().skip(1);
        while let Some(argument) = given.next() {
            match argument.as_str() {
                "--list" => arguments.list = true,
                // One machine serves all cases, one after the other.
                "--test-threads" => drop(given.next()),
                option if option.starts_with('-') => {
                    let value = with_value.contains(&option).then(|| given.next()).flatten();
                    arguments.options.push((argument, value));
                }
                _ => arguments.filter = Some(argument),
            }
        }
        arguments
    }

    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|(name, _)| name == option)
    }

    pub fn value(&self, option: &str) -> Option<&str> {
        let (_, value) = self.options.iter().find(|(name, _)| name == option)?;
        value.as_deref()
    }

    pub fn wants(&self, name: &str) -> bool {
        let filter = self.filter.as_deref();
        filter.is_none_or(|part| name.contains(part))
    }
}

/// Runs those of `cases` that are wanted. The first that fails ends the program.
pub fn run_cases<M>(cases: &[Case<M>], arguments: &Arguments, machine: &mut M) {
    for (name, case) in cases.iter().filter(|(name, _)| arguments.wants(name)) {
        println!("test {name} ...");
        let start = std::time::Instant::now();
        case(machine);
        println!("test {name} ... ok ({} ms)", start.elapsed().as_millis());
    }
}
