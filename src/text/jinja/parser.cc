#include "text/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "text/jinja/expression_parser.h"

namespace sortie::text::jinja {
namespace {

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body template_body() {
    Body body = parse_body({});
    if (peek().kind != TokenKind::kEnd) fail("a block ends that was not begun", peek().line);
    return body;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  StatementPtr make(Statement::Kind kind) const {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = peek().line;
    return statement;
  }

  // Statements up to a block named in `ends`, whose "{% name" is consumed; end_ is that name.
  Body parse_body(Names ends) {
    const Nesting nesting(*this);
    Body body;
    end_.clear();
    for (;;) {
      const Token& token = peek();
      if (token.kind == TokenKind::kEnd) {
        if (ends.size() > 0) {
          fail(fmt::format("the template ends where {} was expected", *(ends.end() - 1)),
               token.line);
        }
        return body;
      }
      if (token.kind == TokenKind::kText) {
        body.push_back(make(Statement::kText));
        body.back()->text = next().text;
      } else if (token.kind == TokenKind::kOutputBegin) {
        body.push_back(make(Statement::kOutput));
        next();
        body.back()->value = tuple();
        expect(TokenKind::kOutputEnd, "}}");
      } else {
        expect(TokenKind::kBlockBegin, "a tag");
        const std::string name = expect(TokenKind::kName, "the name of a block").text;
        if (std::find(ends.begin(), ends.end(), name) != ends.end()) {
          end_ = name;
          return body;
        }
        body.push_back(block(name));
      }
    }
  }

  // A body whose end tag is read whole.
  Body body_until(std::string_view end) {
    block_end();
    Body body = parse_body({end});
    block_end();
    return body;
  }

  void block_end() { expect(TokenKind::kBlockEnd, "%}"); }

  StatementPtr block(const std::string& name) {
    if (name == "if") return if_block();
    if (name == "for") return for_block();
    if (name == "set") return set_block();
    if (name == "macro") return macro_block();
    if (name == "call") return call_block();
    if (name == "filter") return filter_block();
    if (name == "with") return with_block();
    if (name == "generation") {
      auto statement = make(Statement::kGeneration);
      statement->body = body_until("endgeneration");
      return statement;
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail(fmt::format("{} stands outside a loop", name), peek().line);
      auto statement = make(name == "break" ? Statement::kBreak : Statement::kContinue);
      block_end();
      return statement;
    }
    fail(fmt::format("the block '{}' is not supported here", name), peek().line);
  }

  StatementPtr if_block() {
    auto statement = make(Statement::kIf);
    ExpressionPtr condition = tuple();
    for (;;) {
      block_end();
      Body body = parse_body({"elif", "else", "endif"});
      statement->branches.emplace_back(std::move(condition), std::move(body));
      if (end_ == "elif") {
        condition = tuple();
        continue;
      }
      if (end_ == "else") statement->branches.emplace_back(nullptr, body_until("endif"));
      if (end_ == "endif" && statement->branches.back().first != nullptr) block_end();
      return statement;
    }
  }

  StatementPtr for_block() {
    auto statement = make(Statement::kFor);
    statement->assignments.emplace_back(target(false), nullptr);
    expect_name("in");
    statement->value = tuple(false);
    if (accept_name("if")) statement->condition = expression();
    if (is_name("recursive")) fail("recursive loops are not supported", peek().line);
    block_end();
    ++loops_;
    statement->body = parse_body({"else", "endfor"});
    --loops_;
    if (end_ == "else") {
      statement->otherwise = body_until("endfor");
    } else {
      block_end();
    }
    return statement;
  }

  StatementPtr set_block() {
    auto statement = make(Statement::kSet);
    Target to = target(true);
    if (accept("=")) {
      statement->assignments.emplace_back(std::move(to), tuple());
      block_end();
      return statement;
    }
    statement->kind = Statement::kSetBlock;
    statement->assignments.emplace_back(std::move(to), nullptr);
    if (is("|")) statement->value = filters(captured());
    statement->body = body_until("endset");
    return statement;
  }

  ExpressionPtr captured() const { return make_expression(Expression::kCaptured); }

  // A name, ns.attribute, or several separated by commas, perhaps in brackets.
  Target target(bool attributes) {
    const Nesting nesting(*this);
    Target first = single_target(attributes);
    if (!is(",")) return first;
    Target all;
    all.parts.push_back(std::move(first));
    while (accept(",")) {
      if (is("=") || is_name("in") || is(")")) break;
      all.parts.push_back(single_target(attributes));
    }
    return all;
  }

  Target single_target(bool attributes) {
    if (accept("(")) {
      Target inner = target(attributes);
      expect(")");
      return inner;
    }
    Target result;
    result.name = expect(TokenKind::kName, "a name to assign to").text;
    static constexpr std::string_view kConstants[] = {"true", "false", "none",
                                                      "True", "False", "None"};
    if (std::find(std::begin(kConstants), std::end(kConstants), result.name) !=
        std::end(kConstants)) {
      fail(fmt::format("cannot assign to {}", result.name), peek().line);
    }
    if (attributes && accept(".")) {
      result.attribute = expect(TokenKind::kName, "an attribute's name").text;
    }
    return result;
  }

  void parameters(MacroStatement& macro) {
    expect("(");
    while (!is(")")) {
      std::string name = expect(TokenKind::kName, "a parameter's name").text;
      ExpressionPtr otherwise;
      if (accept("=")) otherwise = expression();
      macro.parameters.emplace_back(std::move(name), std::move(otherwise));
      if (!accept(",")) break;
    }
    expect(")");
  }

  // break and continue do not reach out of a macro.
  void macro_body(MacroStatement& macro, std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    macro.body = body_until(end);
    loops_ = loops;
  }

  StatementPtr macro_block() {
    auto statement = make(Statement::kMacro);
    statement->macro.name = expect(TokenKind::kName, "the macro's name").text;
    parameters(statement->macro);
    macro_body(statement->macro, "endmacro");
    return statement;
  }

  StatementPtr call_block() {
    auto statement = make(Statement::kCallBlock);
    statement->macro.name = "caller";
    if (is("(")) parameters(statement->macro);
    statement->value = expression();
    if (statement->value->kind != Expression::kChain ||
        statement->value->links.back().kind != Link::kCall) {
      fail("call needs a call of a macro", statement->line);
    }
    macro_body(statement->macro, "endcall");
    return statement;
  }

  StatementPtr filter_block() {
    auto statement = make(Statement::kFilterBlock);
    statement->value = filters(captured(), true);
    statement->body = body_until("endfilter");
    return statement;
  }

  StatementPtr with_block() {
    auto statement = make(Statement::kWith);
    while (peek().kind != TokenKind::kBlockEnd) {
      Target to = single_target(false);
      expect("=");
      statement->assignments.emplace_back(std::move(to), expression());
      if (!accept(",")) break;
    }
    statement->body = body_until("endwith");
    return statement;
  }

  std::string end_;
  int loops_ = 0;
};

}  // namespace

Body parse(std::string_view source) { return Parser(lex(source)).template_body(); }

}  // namespace sortie::text::jinja
