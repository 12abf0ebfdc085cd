"""English request templates of the fund assistant, by split and category.

Those of the training split are in templates_en_questions and templates_en_orders.
"""

from tools_env.fund import templates_en_orders, templates_en_questions
from tools_env.fund.templates import buy, hard, plain, sell

ACCOUNTS = {"savings": "savings", "brokerage": "brokerage", "checking": "checking"}
MARKETS = {"US": "US", "American": "US", "Hong Kong": "HK", "Chinese": "CN"}
PERIODS = {"week": 7, "7 days": 7, "10 days": 10, "month": 30, "30 days": 30}
TIMES = ("this morning", "today", "yesterday", "on Friday", "on Monday")
OPENERS = ("", "", "", "Hi, ", "Hello, ", "Quick question: ")
CLOSERS = ("", "", "", " Thanks!", " Please help.")

_TEST = {
    "balance": (
        *plain(
            "How much do I have in {account}?",
            "Could you show me what {account} holds?",
            "My {account} total, please.",
            "What sum is available in my {account} account?",
        ),
        hard("With the market this wild, how much cash is in my {account}?"),
        hard("Have I still got {amount} in {account}?"),
    ),
    "history": plain(
        "I'd like my account activity for the past {period}.",
        "What {symbol} trades have I made so far?",
        "Go through my orders of the last {period} with me.",
        "Print the {symbol} transactions of the past {period}.",
        "Has anything gone out of my account in the last {period}?",
    )
    + (hard("The market was open on my birthday; did I trade {symbol} then?"),),
    "market": plain(
        "Is {market} trading open at this hour?",
        "Can you tell me if the {market} market is closed?",
        "Which hours does the {market} exchange keep?",
        "Will the {market} market be open today?",
        "Are {market} exchanges closed for a holiday?",
    )
    + (hard("I may sell {symbol}; is the {market} market open now?"),),
    "transfer": plain(
        "Send {amount} over to {account}.",
        "Please transfer {amount} into {account}.",
        "Have {amount} placed in my {account} account.",
        "Can {amount} be moved to {account}?",
        "Bring {account} up by {amount}.",
    )
    + (hard("While the market is closed, shift {amount} to {account}."),),
    "withdraw": plain(
        "Please withdraw {amount} for me.",
        "I'd like to take out {amount}.",
        "Send {amount} of my cash to my bank.",
        "Cash out {amount}, please.",
        "Could I have {amount} paid to my card?",
    )
    + (hard("Take {amount} out before the market turns."),),
    "order": (
        buy("Please purchase {quantity} {symbol} shares."),
        buy("Use {amount} to buy {symbol}."),
        buy("Pick up {quantity} {symbol} for me."),
        sell("Please sell {quantity} of my {symbol}."),
        sell("Get rid of {quantity} {symbol} shares."),
        sell("Sell {amount} worth of {symbol} while the market is open.", hard=True),
    ),
    "deposit": plain(
        "Did the {amount} I wired {when} come through?",
        "I deposited {amount} {when}; can I invest it now?",
        "Is the {amount} I sent to {account} {when} available?",
        "My deposit of {amount} is not showing in {account}.",
        "When will the {amount} I paid in {when} clear?",
    )
    + (hard("Is my {amount} deposit ready to buy {symbol} at the open?"),),
    "settlement": plain(
        "When do I get the money for the {symbol} I sold {when}?",
        "I sold my {symbol} {when}; has it settled?",
        "Are the proceeds of my {symbol} sale available?",
        "Sold {symbol} {when}. How long until I am paid?",
        "The cash for {quantity} {symbol} sold {when} is missing.",
    )
    + (hard("Does my balance include the {symbol} that I sold {when}?"),),
    "intraday": plain(
        "Can I sell the {symbol} I bought today before the market closes?",
        "Is a same-day round trip in {symbol} possible this session?",
        "Is it too late for a {symbol} trade before the bell?",
        "Would an order for {quantity} {symbol} still fill this session?",
        "Can I get out of {symbol} again before today's close?",
    )
    + (hard("If I sell {symbol} now, does it count for today's session?"),),
}

_VALIDATION = {
    "balance": plain(
        "How big is my {account} balance?",
        "What have I got in {account}?",
        "Read me the funds in {account}.",
    ),
    "history": plain(
        "Bring up the last {period} of transactions.",
        "Which {symbol} trades are on record?",
        "What went on in my account these past {period}?",
    ),
    "market": plain(
        "Has {market} trading started?",
        "Is the {market} exchange closed now?",
        "When is the {market} market open?",
    ),
    "transfer": plain(
        "Please shift {amount} into {account}.",
        "Get {amount} into my {account} account.",
        "Transfer to {account}: {amount}.",
    ),
    "withdraw": plain(
        "I want {amount} withdrawn.",
        "Hand me {amount} in cash.",
        "Move {amount} out to my own bank.",
    ),
    "order": (
        buy("Order {quantity} shares of {symbol}."),
        buy("Spend {amount} on {symbol}."),
        sell("Sell off {quantity} {symbol}."),
    ),
    "deposit": plain(
        "Has my {amount} deposit from {when} landed?",
        "I added {amount} to {account} {when}; is it cleared?",
        "May I spend the {amount} I deposited {when}?",
    ),
    "settlement": plain(
        "I sold {symbol} {when}. Where is my money?",
        "When does my sale of {quantity} {symbol} settle?",
        "Is the money from selling {symbol} here yet?",
    ),
    "intraday": plain(
        "Can I sell {symbol} in the session I bought it in?",
        "Is today's session long enough to trade {symbol} twice?",
        "Will {quantity} {symbol} still go through before the close?",
    ),
}

_TRAIN = templates_en_questions.TRAIN | templates_en_orders.TRAIN
REQUESTS = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST}

PHRASES = {
    "train": {
        "transfer": plain(
            "transfer {amount} to {account}",
            "move {amount} to {account}",
            "put {amount} in {account}",
            "shift {amount} into {account}",
            "top up {account} with {amount}",
        ),
        "withdraw": plain(
            "withdraw {amount}",
            "cash out {amount}",
            "pay {amount} out to my bank",
            "take {amount} out in cash",
            "send {amount} to my bank card",
        ),
        "order": (
            buy("buy {quantity} {symbol}"),
            sell("sell {quantity} {symbol}"),
            buy("invest {amount} in {symbol}"),
            buy("get {quantity} {symbol}"),
            sell("sell {amount} of {symbol}"),
            buy("put {amount} into {symbol}"),
            sell("unload {quantity} {symbol}"),
        ),
        "balance": plain(
            "check my balance",
            "tell me my balance",
            "see how much cash I have",
            "look at my {account} balance",
            "tell me what is in {account}",
        ),
        "history": plain(
            "list my transactions",
            "show my {symbol} trades",
            "read me my last trades",
            "pull up my {symbol} orders",
            "list what I did in the last {period}",
        ),
        "market": plain(
            "see if the market is open",
            "check the {market} market",
            "find out the {market} trading hours",
            "tell me if exchanges are open",
            "check that the {market} market is trading",
        ),
    },
    "validation": {
        "transfer": plain("shift {amount} to {account}"),
        "withdraw": plain("take out {amount}"),
        "order": (buy("order {quantity} {symbol}"),),
        "balance": plain("look up my balance"),
        "history": plain("bring up my transactions"),
        "market": plain("find out if the market is open"),
    },
    "test": {
        "transfer": plain("send {amount} over to {account}"),
        "withdraw": plain("make a withdrawal of {amount}"),
        "order": (
            buy("purchase {quantity} {symbol}"),
            sell("sell {quantity} of my {symbol}"),
        ),
        "balance": plain("show me what I have"),
        "history": plain("go over my {symbol} trades"),
        "market": plain("make sure the {market} market is open"),
    },
}

CONNECTORS = {
    "train": (
        "{first}, then {second}.",
        "{first} and then {second}, please.",
        "First {first}, and after that {second}.",
        "I want you to {first} and {second} afterwards.",
        "Two things: {first}; next, {second}.",
        "Start with this: {first}. When it is done, {second}.",
        "After you {first}, {second}.",
        "Once you {first}, go on and {second}.",
        "{first}, {second}, then {third}.",
        "First {first}, then {second}, and finally {third}.",
        "{second}, but {first} before that.",
        "Before you {second}, {first}.",
        "Do not {second} until you {first}.",
        "I need you to {second}, though first {first}.",
        "{first}; {second} when that is done.",
        "To begin with, {first}; then {second}.",
        "Would you {first} and next {second}?",
        "{first} first and {second} second.",
        "As soon as you {first}, {second}.",
        "Could you {first}, and right after that {second}?",
        "I'd like you to {first}. Then {second}.",
        "{second} at the end, after you {first}.",
        "Only after you {first} should you {second}.",
        "First of all {first}, later {second} and {third}.",
        "{first}; with that behind us, {second}.",
        "Please {second} once you {first}.",
    ),
    "validation": (
        "{first}; when finished, {second}.",
        "Begin here: {first}. Afterwards {second}.",
        "{second}, only first {first}.",
    ),
    "test": (
        "Please {first}, followed by this: {second}.",
        "{first}. Next, {second}.",
        "As step one {first}, as step two {second}.",
        "When you are through with this ({first}), {second}.",
        "Please {second}, but not before you {first}.",
        "Ahead of everything {first}; {second} after it.",
    ),
}
