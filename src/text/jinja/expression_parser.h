#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace sortie::text::jinja {

// Tokens to expressions, by jinja2's precedence: inline if, or, and, not, comparisons, + and -, ~,
// * / // %, **, signs, then attributes, calls, filters and tests.
class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  // Counts how deep brackets and blocks nest; the parser's recursion and the tree's depth follow.
  class Nesting {
   public:
    explicit Nesting(ExpressionParser& parser);
    ~Nesting() { --parser_.depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    ExpressionParser& parser_;
  };

  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  Token next();
  bool is(std::string_view op) const;
  bool accept(std::string_view op);
  void expect(std::string_view op);
  bool is_name(std::string_view name) const;
  bool accept_name(std::string_view name);
  void expect_name(std::string_view name);
  Token expect(TokenKind kind, std::string_view what);

  ExpressionPtr make_expression(Expression::Kind kind) const;
  // One expression, or several separated by commas, which make a tuple. `conditions`: with inline
  // if (the `if` after a for's list is its filter).
  ExpressionPtr tuple(bool conditions = true);
  ExpressionPtr expression(bool conditions = true);
  // operand | a | b …; `bare`: the first filter stands without its bar.
  ExpressionPtr filters(ExpressionPtr operand, bool bare = false);

 private:
  ExpressionPtr disjunction();
  ExpressionPtr conjunction();
  ExpressionPtr negation();
  ExpressionPtr comparison();
  ExpressionPtr sum();
  ExpressionPtr concatenation();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr sign(bool with_filters);
  ExpressionPtr primary();
  ExpressionPtr integer();
  ExpressionPtr brackets();
  ExpressionPtr list();
  ExpressionPtr dict();
  // Attributes, subscripts and calls.
  ExpressionPtr postfix(ExpressionPtr operand);
  // Filters, tests, and calls of what they give.
  ExpressionPtr filters_and_tests(ExpressionPtr operand);
  Link subscript();
  Link filter();
  Link test();
  std::vector<Argument> arguments();
  static Link& link(ExpressionPtr& operand, Link added);
  bool ends_expression() const;

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace sortie::text::jinja
