//! Fields that interact, as `oci/pairs` lists them, and whether a bundle sets all fields of a pair.

use std::collections::BTreeMap;
use std::fmt;

use cube_tests::small;
use serde_json::json;

use crate::bundle::{Case, fields};

/// The list.
const PAIRS: &str = include_str!("pairs");

/// Two or more fields that interact, and how.
pub struct Pair {
    line: usize,
    fields: Vec<Field>,
    reason: String,
}

/// A field of a pair.
struct Field {
    /// As it is written.
    text: &'static str,
    /// Whether the bundle is to be without it.
    is_absent: bool,
    parts: Vec<&'static str>,
    value: Option<&'static str>,
}

/// What the variables of a pair stand for.
type Bound = BTreeMap<&'static str, String>;

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Vec<_> = self.fields.iter().map(|field| field.text).collect();
        write!(
            f,
            "line {}: {} ({})",
            self.line,
            fields.join(" & "),
            self.reason
        )
    }
}

/// All of them.
pub fn all() -> Vec<Pair> {
    let lines = PAIRS.lines().zip(1..);
    lines
        .filter(|(line, _)| !line.is_empty() && !line.starts_with('#'))
        .map(|(line, n)| Pair::parse(line, n))
        .collect()
}

impl Pair {
    fn parse(text: &'static str, line: usize) -> Self {
        let (fields, reason) = text.split_once(": ").unwrap_or((text, ""));
        let fields: Vec<_> = fields.split(" & ").map(Field::parse).collect();
        assert!(fields.len() > 1, "line {line} has no pair: {text}");
        assert!(!reason.is_empty(), "line {line} has no reason: {text}");
        Self {
            line,
            fields,
            reason: reason.to_owned(),
        }
    }

    /// What is wrong with a field's name; `schema` is the list of those that there are.
    pub fn unknown<'a>(&'a self, schema: &'a [&str]) -> impl Iterator<Item = String> + 'a {
        let unknown = self.fields.iter().filter(|field| !field.is_in(schema));
        unknown.map(|field| format!("line {}: {}", self.line, field.text))
    }

    /// Whether the bundle sets all of the fields.
    pub fn is_in(&self, bundle: &Bundle) -> bool {
        let (absent, present): (Vec<_>, Vec<_>) = self.fields.iter().partition(|f| f.is_absent);
        let is_without = |field: &Field| !is_any(field, &bundle.whole);
        absent.into_iter().all(is_without) && are_set(&present, &bundle.set, &Bound::new())
    }
}

/// What a bundle has, as paths.
pub struct Bundle {
    /// What its change sets, and its update.
    set: Vec<Vec<String>>,
    /// That and what the small bundle has.
    whole: Vec<Vec<String>>,
}

impl From<&Case> for Bundle {
    fn from(case: &Case) -> Self {
        let mut set = fields(&case.change);
        if let Some(update) = &case.update {
            set.extend(fields(&json!({"update": update})));
        }
        let whole = fields(&case.config(""));
        Self { set, whole }
    }
}

impl Field {
    fn parse(text: &'static str) -> Self {
        let (path, value) = match text.split_once('=') {
            Some((path, value)) => (path, Some(value)),
            None => (text, None),
        };
        let is_absent = path.starts_with('!');
        Self {
            text,
            is_absent,
            parts: path.trim_start_matches('!').split('.').collect(),
            value,
        }
    }

    /// Whether the schema has such a field, or such fields in it, and the value if it lists values. A field that is to be
    /// absent must be one that the small bundle has: otherwise it would say nothing.
    fn is_in(&self, schema: &[&str]) -> bool {
        let parts: Vec<_> = match self.parts.split_first() {
            Some((&"update", rest)) => ["linux", "resources"].iter().chain(rest).collect(),
            _ => self.parts.iter().collect(),
        };
        let agree = |known: &&str| -> bool {
            let (name, value) = match known.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (*known, None),
            };
            let known: Vec<_> = name.split('.').collect();
            let same = known.iter().zip(&parts);
            // A key of a map may have dots.
            (parts.len() <= known.len() || known.ends_with(&["*"]))
                && same.into_iter().all(|(known, part)| {
                    *known == "*" || known == *part || (*known == "[]" && part.starts_with('['))
                })
                && (self.value.is_none_or(|v| v.starts_with('$'))
                    || (parts.len() >= known.len() && (value.is_none() || value == self.value)))
        };
        schema.iter().any(agree) && (!self.is_absent || is_any(self, &fields(&small())))
    }

    /// What the variables stand for if the field is the one, or holds the one, at this path.
    fn at(&self, path: &[String], bound: &Bound) -> Option<Bound> {
        if path.len() <= self.parts.len() {
            return None;
        }
        let mut bound = bound.clone();
        let mut agree = |wanted: &'static str, is: &String| match wanted {
            "*" => true,
            _ if wanted.starts_with('$') => {
                *bound.entry(wanted).or_insert_with(|| is.clone()) == *is
            }
            _ => wanted == is,
        };
        for (part, is) in self.parts.iter().zip(path) {
            let item = part.strip_prefix('[').and_then(|p| p.strip_suffix(']'));
            let agrees = match item {
                Some(item) => is.starts_with('[') && (item.is_empty() || agree(item, is)),
                None => agree(part, is),
            };
            if !agrees {
                return None;
            }
        }
        let is_value =
            |value| path.len() == self.parts.len() + 1 && agree(value, &path[self.parts.len()]);
        self.value.is_none_or(is_value).then_some(bound)
    }
}

fn is_any(field: &Field, paths: &[Vec<String>]) -> bool {
    paths
        .iter()
        .any(|path| field.at(path, &Bound::new()).is_some())
}

/// Whether each of the fields is at one of the paths, with the same meaning of each variable.
fn are_set(wanted: &[&Field], paths: &[Vec<String>], bound: &Bound) -> bool {
    let Some((first, rest)) = wanted.split_first() else {
        return true;
    };
    let mut places = paths.iter().filter_map(|path| first.at(path, bound));
    places.any(|bound| are_set(rest, paths, &bound))
}
