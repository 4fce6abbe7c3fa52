#include "text/jinja/expression_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace sortie::text::jinja {
namespace {

constexpr int kMaxNesting = 80;

}  // namespace

ExpressionParser::Nesting::Nesting(ExpressionParser& parser) : parser_(parser) {
  if (parser_.depth_ >= kMaxNesting) {
    fail(fmt::format("the template nests deeper than {}", kMaxNesting), parser.peek().line);
  }
  ++parser_.depth_;
}

Token ExpressionParser::next() {
  Token token = peek();
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool ExpressionParser::is(std::string_view op) const {
  return peek().kind == TokenKind::kOperator && peek().text == op;
}

bool ExpressionParser::accept(std::string_view op) {
  if (!is(op)) return false;
  next();
  return true;
}

void ExpressionParser::expect(std::string_view op) {
  if (!accept(op)) {
    fail(fmt::format("expected '{}' before '{}'", op, peek().text), peek().line);
  }
}

bool ExpressionParser::is_name(std::string_view name) const {
  return peek().kind == TokenKind::kName && peek().text == name;
}

bool ExpressionParser::accept_name(std::string_view name) {
  if (!is_name(name)) return false;
  next();
  return true;
}

void ExpressionParser::expect_name(std::string_view name) {
  if (!accept_name(name)) {
    fail(fmt::format("expected '{}' before '{}'", name, peek().text), peek().line);
  }
}

Token ExpressionParser::expect(TokenKind kind, std::string_view what) {
  if (peek().kind != kind) {
    fail(fmt::format("expected {} before '{}'", what, peek().text), peek().line);
  }
  return next();
}

ExpressionPtr ExpressionParser::make_expression(Expression::Kind kind) const {
  auto made = std::make_unique<Expression>();
  made->kind = kind;
  made->line = peek().line;
  return made;
}

bool ExpressionParser::ends_expression() const {
  const TokenKind kind = peek().kind;
  return kind == TokenKind::kOutputEnd || kind == TokenKind::kBlockEnd || kind == TokenKind::kEnd ||
         is(")") || is("]") || is("}") || is("=");
}

ExpressionPtr ExpressionParser::tuple(bool conditions) {
  ExpressionPtr first = expression(conditions);
  if (!is(",")) return first;
  ExpressionPtr all = make_expression(Expression::kTuple);
  all->children.push_back(std::move(first));
  while (accept(",")) {
    if (ends_expression()) break;
    all->children.push_back(expression(conditions));
  }
  return all;
}

ExpressionPtr ExpressionParser::expression(bool conditions) {
  const Nesting nesting(*this);
  ExpressionPtr value = disjunction();
  if (!conditions) return value;
  // a if b else c if d else e: what follows `else` is parsed one level deeper.
  if (is_name("if")) {
    ExpressionPtr whole = make_expression(Expression::kCondition);
    next();
    whole->children.push_back(std::move(value));
    whole->children.push_back(disjunction());
    whole->children.push_back(accept_name("else") ? expression() : nullptr);
    return whole;
  }
  return value;
}

ExpressionPtr ExpressionParser::disjunction() {
  ExpressionPtr first = conjunction();
  if (!is_name("or")) return first;
  ExpressionPtr all = make_expression(Expression::kOr);
  all->children.push_back(std::move(first));
  while (accept_name("or")) all->children.push_back(conjunction());
  return all;
}

ExpressionPtr ExpressionParser::conjunction() {
  ExpressionPtr first = negation();
  if (!is_name("and")) return first;
  ExpressionPtr all = make_expression(Expression::kAnd);
  all->children.push_back(std::move(first));
  while (accept_name("and")) all->children.push_back(negation());
  return all;
}

ExpressionPtr ExpressionParser::negation() {
  if (!is_name("not")) return comparison();
  const Nesting nesting(*this);
  ExpressionPtr result = make_expression(Expression::kNot);
  next();
  result->children.push_back(negation());
  return result;
}

ExpressionPtr ExpressionParser::comparison() {
  static constexpr std::string_view kOperators[] = {"==", "!=", "<", "<=", ">", ">="};
  ExpressionPtr first = sum();
  ExpressionPtr all;
  for (;;) {
    Link link{
        .kind = Link::kOperator, .line = peek().line, .name = {}, .arguments = {}, .operand = {}};
    if (peek().kind == TokenKind::kOperator &&
        std::find(std::begin(kOperators), std::end(kOperators), peek().text) !=
            std::end(kOperators)) {
      link.name = next().text;
    } else if (accept_name("in")) {
      link.name = "in";
    } else if (is_name("not") && peek(1).kind == TokenKind::kName && peek(1).text == "in") {
      next();
      next();
      link.name = "not in";
    } else {
      return all == nullptr ? std::move(first) : std::move(all);
    }
    if (all == nullptr) {
      all = make_expression(Expression::kCompare);
      all->children.push_back(std::move(first));
    }
    link.operand = sum();
    all->links.push_back(std::move(link));
  }
}

ExpressionPtr ExpressionParser::sum() {
  ExpressionPtr first = concatenation();
  if (!is("+") && !is("-")) return first;
  ExpressionPtr all = make_expression(Expression::kArithmetic);
  all->children.push_back(std::move(first));
  while (is("+") || is("-")) {
    Link link{.kind = Link::kOperator,
              .line = peek().line,
              .name = next().text,
              .arguments = {},
              .operand = {}};
    link.operand = concatenation();
    all->links.push_back(std::move(link));
  }
  return all;
}

ExpressionPtr ExpressionParser::concatenation() {
  ExpressionPtr first = product();
  if (!is("~")) return first;
  ExpressionPtr all = make_expression(Expression::kConcat);
  all->children.push_back(std::move(first));
  while (accept("~")) all->children.push_back(product());
  return all;
}

ExpressionPtr ExpressionParser::product() {
  ExpressionPtr first = power();
  const auto here = [&] { return is("*") || is("/") || is("//") || is("%"); };
  if (!here()) return first;
  ExpressionPtr all = make_expression(Expression::kArithmetic);
  all->children.push_back(std::move(first));
  while (here()) {
    Link link{.kind = Link::kOperator,
              .line = peek().line,
              .name = next().text,
              .arguments = {},
              .operand = {}};
    link.operand = power();
    all->links.push_back(std::move(link));
  }
  return all;
}

ExpressionPtr ExpressionParser::power() {
  ExpressionPtr first = sign(true);
  if (!is("**")) return first;
  ExpressionPtr all = make_expression(Expression::kArithmetic);
  all->children.push_back(std::move(first));
  while (is("**")) {
    Link link{.kind = Link::kOperator,
              .line = peek().line,
              .name = next().text,
              .arguments = {},
              .operand = {}};
    link.operand = sign(true);
    all->links.push_back(std::move(link));
  }
  return all;
}

ExpressionPtr ExpressionParser::sign(bool with_filters) {
  const Nesting nesting(*this);
  ExpressionPtr operand;
  if (is("-") || is("+")) {
    operand = make_expression(is("-") ? Expression::kNegate : Expression::kPlus);
    next();
    operand->children.push_back(sign(false));
  } else {
    operand = primary();
  }
  operand = postfix(std::move(operand));
  return with_filters ? filters_and_tests(std::move(operand)) : std::move(operand);
}

ExpressionPtr ExpressionParser::primary() {
  const Token& token = peek();
  ExpressionPtr result = make_expression(Expression::kLiteral);
  switch (token.kind) {
    case TokenKind::kName:
      if (token.text == "true" || token.text == "True") {
        result->literal = true;
      } else if (token.text == "false" || token.text == "False") {
        result->literal = false;
      } else if (token.text != "none" && token.text != "None") {
        result->kind = Expression::kName;
        result->name = token.text;
      }
      next();
      return result;
    case TokenKind::kString: {
      std::string text;
      while (peek().kind == TokenKind::kString) text += next().text;  // neighbours join
      result->literal = std::move(text);
      return result;
    }
    case TokenKind::kInteger:
      return integer();
    case TokenKind::kFloat: {
      double value = 0;
      const std::string text = next().text;
      std::from_chars(text.data(), text.data() + text.size(), value);
      result->literal = value;
      return result;
    }
    case TokenKind::kOperator:
      if (is("(")) return brackets();
      if (is("[")) return list();
      if (is("{")) return dict();
      [[fallthrough]];
    default:
      fail(fmt::format("expected a value before '{}'", token.text), token.line);
  }
}

ExpressionPtr ExpressionParser::integer() {
  ExpressionPtr result = make_expression(Expression::kLiteral);
  const Token token = next();
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
  if (error != std::errc() || end != token.text.data() + token.text.size()) {
    fail(fmt::format("{} is not an integer of 64 bits", token.text), token.line);
  }
  result->literal = value;
  return result;
}

ExpressionPtr ExpressionParser::brackets() {
  ExpressionPtr empty = make_expression(Expression::kTuple);
  expect("(");
  if (accept(")")) return empty;
  ExpressionPtr inner = tuple();
  expect(")");
  return inner;
}

ExpressionPtr ExpressionParser::list() {
  ExpressionPtr result = make_expression(Expression::kList);
  expect("[");
  while (!is("]")) {
    result->children.push_back(expression());
    if (!accept(",")) break;
  }
  expect("]");
  return result;
}

ExpressionPtr ExpressionParser::dict() {
  ExpressionPtr result = make_expression(Expression::kDict);
  expect("{");
  while (!is("}")) {
    result->children.push_back(expression());
    expect(":");
    result->children.push_back(expression());
    if (!accept(",")) break;
  }
  expect("}");
  return result;
}

Link& ExpressionParser::link(ExpressionPtr& operand, Link added) {
  if (operand->kind != Expression::kChain) {
    auto chain = std::make_unique<Expression>();
    chain->kind = Expression::kChain;
    chain->line = operand->line;
    chain->children.push_back(std::move(operand));
    operand = std::move(chain);
  }
  operand->links.push_back(std::move(added));
  return operand->links.back();
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr operand) {
  for (;;) {
    const int line = peek().line;
    if (accept(".")) {
      if (peek().kind == TokenKind::kInteger) {  // list.0
        Link at{.kind = Link::kSubscript, .line = line, .name = {}, .arguments = {}, .operand = {}};
        at.arguments.push_back({{}, integer()});
        link(operand, std::move(at));
        continue;
      }
      link(operand, {.kind = Link::kAttribute,
                     .line = line,
                     .name = expect(TokenKind::kName, "an attribute's name").text,
                     .arguments = {},
                     .operand = {}});
    } else if (is("[")) {
      link(operand, subscript());
    } else if (is("(")) {
      link(
          operand,
          {.kind = Link::kCall, .line = line, .name = {}, .arguments = arguments(), .operand = {}});
    } else {
      return operand;
    }
  }
}

Link ExpressionParser::subscript() {
  Link result{
      .kind = Link::kSubscript, .line = peek().line, .name = {}, .arguments = {}, .operand = {}};
  expect("[");
  const auto bound = [&] { return is(":") || is("]") ? nullptr : expression(); };
  ExpressionPtr first = is(":") ? nullptr : tuple();
  const bool slice = is(":");
  result.arguments.push_back({{}, std::move(first)});
  if (slice) {
    result.kind = Link::kSlice;
    expect(":");
    result.arguments.push_back({{}, bound()});
    result.arguments.push_back({{}, accept(":") ? bound() : nullptr});
  }
  expect("]");
  return result;
}

std::vector<Argument> ExpressionParser::arguments() {
  std::vector<Argument> result;
  expect("(");
  while (!is(")")) {
    if (is("*") || is("**")) fail("* and ** arguments are not supported", peek().line);
    Argument argument;
    if (peek().kind == TokenKind::kName && peek(1).kind == TokenKind::kOperator &&
        peek(1).text == "=") {
      argument.name = next().text;
      next();
    } else if (!result.empty() && !result.back().name.empty()) {
      fail("an argument by position follows one by name", peek().line);
    }
    argument.value = expression();
    result.push_back(std::move(argument));
    if (!accept(",")) break;
  }
  expect(")");
  return result;
}

ExpressionPtr ExpressionParser::filters(ExpressionPtr operand, bool bare) {
  if (bare) link(operand, filter());
  while (accept("|")) link(operand, filter());
  return operand;
}

ExpressionPtr ExpressionParser::filters_and_tests(ExpressionPtr operand) {
  for (;;) {
    if (accept("|")) {
      link(operand, filter());
    } else if (accept_name("is")) {
      link(operand, test());
    } else if (is("(")) {  // what a filter gives may be called
      const int line = peek().line;
      link(
          operand,
          {.kind = Link::kCall, .line = line, .name = {}, .arguments = arguments(), .operand = {}});
    } else {
      return operand;
    }
  }
}

Link ExpressionParser::filter() {
  Link result{
      .kind = Link::kFilter, .line = peek().line, .name = {}, .arguments = {}, .operand = {}};
  result.name = expect(TokenKind::kName, "a filter's name").text;
  if (is("(")) result.arguments = arguments();
  return result;
}

Link ExpressionParser::test() {
  Link result{.kind = Link::kTest, .line = peek().line, .name = {}, .arguments = {}, .operand = {}};
  result.negated = accept_name("not");
  result.name = expect(TokenKind::kName, "a test's name").text;
  if (is("(")) {
    result.arguments = arguments();
    return result;
  }
  // `is divisibleby 3`: one operand may stand without brackets.
  const TokenKind kind = peek().kind;
  const bool operand = kind == TokenKind::kString || kind == TokenKind::kInteger ||
                       kind == TokenKind::kFloat || is("[") || is("{") ||
                       (kind == TokenKind::kName && !is_name("else") && !is_name("or") &&
                        !is_name("and") && !is_name("if") && !is_name("is") && !is_name("not") &&
                        !is_name("in") && !is_name("recursive"));
  if (operand) {
    const Nesting nesting(*this);
    result.arguments.push_back({{}, postfix(primary())});
  }
  return result;
}

}  // namespace sortie::text::jinja
