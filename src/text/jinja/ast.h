#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

// A parsed template. Chains (a + b + c, a.b.c, x | f | g) are flat, so that the tree is no deeper
// than the source's brackets and blocks.
namespace sortie::text::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Argument {
  std::string name;  // empty: by position
  ExpressionPtr value;
};

// What follows an operand: one link of a chain.
struct Link {
  enum Kind {
    kAttribute,  // .name
    kSubscript,  // [arguments[0]]
    kSlice,      // [a:b:c]; absent bounds are null
    kCall,       // (arguments)
    kFilter,     // | name(arguments)
    kTest,       // is name(arguments), or is not
    kOperator,   // name operand
  };
  Kind kind;
  int line;
  std::string name;
  std::vector<Argument> arguments;
  bool negated = false;
  ExpressionPtr operand;
};

struct Expression {
  enum Kind {
    kLiteral,
    kName,
    kList,
    kTuple,
    kDict,        // children: key, value, key, value …
    kChain,       // children[0], then links
    kArithmetic,  // children[0], then kOperator links, from left to right
    kCompare,     // the same; a < b < c compares both pairs
    kConcat,      // ~
    kAnd,
    kOr,
    kNot,
    kNegate,
    kPlus,
    kCondition,  // children: value, condition, otherwise (may be null)
    kCaptured,   // the text of the block that is being filtered
  };
  Kind kind;
  int line;
  Value literal;
  std::string name;
  std::vector<ExpressionPtr> children;
  std::vector<Link> links;
};

struct Statement;
using StatementPtr = std::unique_ptr<Statement>;
using Body = std::vector<StatementPtr>;

// What is assigned to: a name, ns.attribute, or a tuple of targets.
struct Target {
  std::string name;
  std::string attribute;
  std::vector<Target> parts;
};

struct MacroStatement {
  std::string name;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;  // with defaults, or null
  Body body;
};

struct Statement {
  enum Kind {
    kText,
    kOutput,
    kIf,
    kFor,
    kSet,
    kSetBlock,
    kMacro,
    kCallBlock,
    kFilterBlock,
    kWith,
    kGeneration,
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text;
  std::vector<std::pair<ExpressionPtr, Body>> branches;  // of if; a null condition is else
  std::vector<std::pair<Target, ExpressionPtr>> assignments;
  ExpressionPtr value;
  ExpressionPtr condition;  // of for
  Body body;
  Body otherwise;  // of for
  MacroStatement macro;
};

}  // namespace sortie::text::jinja
